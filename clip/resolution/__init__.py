"""Rules by which a picture of any size becomes tiles: one file each."""
