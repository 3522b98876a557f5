"""Small models that come as ordinary Python packages, as folders that SGLang and transformers load."""
