"""How the frames of a clip become what a tower reads: one file a way."""
