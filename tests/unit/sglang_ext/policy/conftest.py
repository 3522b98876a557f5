"""Property tests run without a time limit per example: the machine may be busy."""

from hypothesis import settings

settings.register_profile("without_deadline", deadline=None)
settings.load_profile("without_deadline")
