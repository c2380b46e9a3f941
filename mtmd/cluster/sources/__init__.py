"""Sources of a batch, in files, tar files and tables: listed, read one by one."""
