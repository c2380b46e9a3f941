"""Chat templates of families that were made for one question about one picture: pictures stand
before all else, whatever turn they came in.
"""

from __future__ import annotations


def pictures_first(turn: str) -> str:
    """Return a template that writes a marker `<image>` for each picture and `<video>` for each
    video, then `turn` for each message `m` and its `text`. It refuses system texts, for which there
    is no place.
    """
    return (
        "{% for m in messages %}{% if m.content is not string %}"
        "{% for c in m.content %}{% if c.type == 'image' %}<image>"
        "{% elif c.type == 'video' %}<video>{% endif %}{% endfor %}"
        "{% endif %}{% if m.role == 'system' %}"
        "{{ raise_exception('there is no place for a system text') }}"
        "{% endif %}{% endfor %}{% for m in messages %}"
        "{% set text = m.content if m.content is string else "
        "m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('\\n') %}"
        + turn
        + "{% endfor %}"
    )
