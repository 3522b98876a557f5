"""The length-aware router: an OpenAI-compatible endpoint over short, long and decode pools."""
