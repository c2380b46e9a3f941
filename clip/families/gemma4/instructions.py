"""Instructions that Gemma 4 was trained to transcribe and translate by."""

from mtmd.clip.audio.instructions import Instructions

INSTRUCTIONS = Instructions(
    # as Google's documentation has them (ai.google.dev/gemma/docs/capabilities/audio)
    transcribe=(
        "Transcribe the following speech segment in its original language. Follow these specific "
        "instructions for formatting the output:\n* Only output the transcription, with no "
        "newlines.\n* When transcribing numbers, write the digits, i.e. write 1.7 and not one "
        "point seven, and write 3 instead of three."
    ),
    transcribe_in=(
        "Transcribe the following speech segment in {language} into {language} text. Follow these "
        "specific instructions for formatting the output:\n* Only output the transcription, with "
        "no newlines.\n* When transcribing numbers, write the digits, i.e. write 1.7 and not one "
        "point seven, and write 3 instead of three."
    ),
    translate=(
        "Translate the following speech segment into {language}. Only output the translation, "
        "with no newlines."
    ),
    seconds=30.0,
)
