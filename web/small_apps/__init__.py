"""Small applications: the server while a model is loaded, and that of a dual encoder."""
