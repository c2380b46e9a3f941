"""The demo model: a small trained model that is part of the package."""
