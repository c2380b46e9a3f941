"""Flash attention of encoders and of prompts."""
