"""The demo model: a small trained model that comes with the package."""
