from __future__ import annotations

import re

import pytest

from mtmd.display.grounding import CHARS_MAX, MAXIMUM, Region, find_regions

SEEN, OWN = (1288, 812), (4000, 3000)


def boxes(text, **sizes):
    result = find_regions(text, **sizes)
    return [(r.kind, r.values, r.label, r.scale) for r in result.regions] if result else []


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"bbox_2d": [10, 20, 30, 40], "label": "cat"}', ("box", (10, 20, 30, 40), "cat", "1000")),
        (
            '```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "a \\"b\\""}]\n```',
            ("box", (10, 20, 30, 40), 'a "b"', "1000"),
        ),
        (
            '```json\n[{"label": "cut off", "bbox_2d": [10, 20, 30, 40], "wh',
            ("box", (10, 20, 30, 40), "cut off", "1000"),
        ),
        (
            "{'bbox_2d': [10, 20, 30, 40], 'label': 'as Python'}",
            ("box", (10, 20, 30, 40), "as Python", "1000"),
        ),
        ('Here: {"point_2d": [5, 6], "label": "eye"} and so on', ("point", (5, 6), "eye", "1000")),
        (
            '{"box_2d": [20, 10, 40, 30], "label": "y first"}',
            ("box", (10, 20, 30, 40), "y first", "1000"),
        ),
        (
            '{"objects": [{"bbox": [[10, 20, 30, 40]], "name": "deep"}]}',
            ("box", (10, 20, 30, 40), "deep", "1000"),
        ),
        (
            '[{"bbox": [10, 20, 30, 40], "category": "Title", "text": "# One"}]',
            ("box", (10, 20, 30, 40), "# One", "1000"),
        ),
        (
            '[{"bbox": [10, 20, 30, 40], "category": "Table", "text": "' + "x" * 3000 + '"}]',
            ("box", (10, 20, 30, 40), "Table", "1000"),
        ),
        ("<box>(10,20),(30,40)</box>", ("box", (10, 20, 30, 40), "", "1000")),
        (
            "<ref>the cat</ref><box>(10,20),(30,40)</box>",
            ("box", (10, 20, 30, 40), "the cat", "1000"),
        ),
        (
            "<|object_ref_start|>the cat<|object_ref_end|><|box_start|>(10,20),(30,40)<|box_end|>",
            ("box", (10, 20, 30, 40), "the cat", "1000"),
        ),
        ("<ref>cat</ref><box>[[10, 20, 30, 40]]</box>", ("box", (10, 20, 30, 40), "cat", "1000")),
        ("<loc0020><loc0010><loc0040><loc0030> cat", ("box", (10, 20, 30, 40), "cat", "1024")),
        (
            "a cat<loc_10><loc_20><loc_30><loc_40>",
            ("box", (10.5, 20.5, 30.5, 40.5), "a cat", "1000"),
        ),
        (
            "A 1<loc_10><loc_21><loc_30><loc_20><loc_29><loc_40><loc_11><loc_39>",
            ("box", (10.5, 20.5, 30.5, 40.5), "A 1", "1000"),
        ),
        (
            '<point x="61.5" y="40.4" alt="an ear">ear</point>',
            ("point", (61.5, 40.4), "an ear", "100"),
        ),
        (
            "<|ref|>title<|/ref|><|det|>[[10, 20, 30, 40]]<|/det|>\n# The cat",
            ("box", (10, 20, 30, 40), "title", "1000"),
        ),
        (
            "a cat<|LOC_10|><|LOC_20|><|LOC_30|><|LOC_21|><|LOC_29|><|LOC_40|><|LOC_11|><|LOC_39|>",
            ("box", (10, 20, 30, 40), "a cat", "1000"),
        ),
        (
            "<|TEXT_START|>a cat<|TEXT_END|><|LOC_BEGIN|><|LOC_10|><|LOC_20|><|LOC_30|><|LOC_21|>"
            "<|LOC_29|><|LOC_40|><|LOC_11|><|LOC_39|><|LOC_END|>",
            ("box", (10, 20, 30, 40), "a cat", "1000"),
        ),
        ("a cat(10,20),(30,40)", ("box", (10, 20, 30, 40), "a cat", "1000")),
        (
            '[{"bbox": [10, 20, 30, 40], "category": "Table", "text": "a"}]',
            ("box", (10, 20, 30, 40), "a", "1000"),
        ),
        ("The cat is at [[10, 20, 30, 40]].", ("box", (10, 20, 30, 40), "", "1000")),
        ("at [0.1, 0.2, 0.3, 0.4]", ("box", (0.1, 0.2, 0.3, 0.4), "", "1")),
        ("at [10, 20, 1200, 40]", ("box", (10, 20, 1200, 40), "", "processed")),
        ("at [10, 20, 3200, 40]", ("box", (10, 20, 3200, 40), "", "original")),
    ],
)
def test_each_notation_is_read(text, expected):
    assert boxes(text, processed=SEEN, original=OWN) == ([expected] if expected else [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no boxes",
        "[1, 2, 3]",
        "[30, 20, 10, 40]",
        '{"bbox_2d": [1, 2, 3]}',
        '{"bbox_2d": ["a", 2, 3, 4]}',
        '{"bbox_2d": [true, 2, 3, 4]}',
        '{"bbox_2d": [-5, 2, 3, 4]}',
        '{"bbox_2d": [NaN, 2, 3, 4]}',
        '{"bbox_2d": [1, 2, 1e9, 4]}',
        "<box></box>",
        "<loc0001><loc0002>",
        '<point x="a" y="2">p</point>',
        "{" * 5000,
        "[" * 5000,
        '{"a":' * 200 + "1" + "}" * 200,
    ],
)
def test_what_is_no_region_is_none(text):
    assert find_regions(text) is None


def test_what_was_chosen_is_explained():
    assert "no number is above 1000" in find_regions("[1, 2, 300, 400]").why
    assert "1288 × 812" in find_regions("[1, 2, 1100, 400]", SEEN, OWN).why
    stated = find_regions("<box>(1,2),(3,4)</box>", SEEN, OWN)
    assert stated.scale == "" and "notation" in stated.why


def test_each_of_several_has_its_own_label():
    text = '[{"bbox_2d": [1, 2, 3, 4], "label": "a"}, {"label": "b", "point_2d": [5, 6]}, {"bbox_2d": [7, 8, 9, 10]}]'
    assert [(r.label, r.kind) for r in find_regions(text).regions] == [
        ("a", "box"),
        ("b", "point"),
        ("", "box"),
    ]


def test_numbers_are_read_alike_in_one_answer():
    result = find_regions(
        '[{"bbox_2d": [1, 2, 300, 400]}, {"bbox_2d": [1, 2, 1100, 400]}]', SEEN, OWN
    )
    assert {r.scale for r in result.regions} == {"processed"}


def test_a_bare_list_beside_a_telling_notation_is_not_a_box():
    assert len(boxes('{"bbox_2d": [10, 20, 30, 40]} out of [1, 2, 3, 4]')) == 1


def test_a_runaway_answer_is_cut():
    result = find_regions(
        '{"bbox_2d": [1, 2, 3, 4], "label": "'
        + "x" * 500
        + '"}' * 1
        + '{"bbox_2d": [1, 2, 3, 4]}' * 1000
    )
    assert len(result.regions) == MAXIMUM and len(result.regions[0].label) == 120


@pytest.mark.parametrize(
    "unit",
    [
        "<box>",
        "[1,",
        "<loc0001>",
        "<point ",
        "{",
        "<ref>",
        "(1,2),",
        '{"a": [',
        "[1, 2, 3",
        "<ref>a</ref> ",
        "[" + " " * 1000,
        '"bbox_2d":' + " " * 1000,
        "<ref>a</ref>" + " " * 1000,
        '{"bbox_2d": [1, 2, 3',
        '"label": "x',
        "<box>" + " " * 2000,
        "(1,2)" + " " * 2000,
        "<point " + "a" * 2000 + ">",
    ],
)
def test_a_long_text_that_only_begins_like_regions_is_read_to_its_end(unit):
    """In a time that grows with its length: were it by the square, this would take minutes."""
    text = unit * (1_000_000 // len(unit))
    assert boxes(f"{text} and <box>(1,2),(3,4)</box>")[-1:] == [("box", (1, 2, 3, 4), "", "1000")]


def test_regions_can_be_told_as_json():
    result = find_regions("[0, 1, 2, 3]").asdict()
    assert (
        result["regions"] == [Region("box", (0.0, 1.0, 2.0, 3.0), "", "1000").asdict()]
        and result["scale"] == "1000"
    )


def test_no_more_of_an_answer_is_read_than_the_limit():
    box = "<box>(1,2),(3,4)</box>"
    assert find_regions(" " * (CHARS_MAX - len(box)) + box) is not None
    assert find_regions(" " * CHARS_MAX + box) is None


def test_a_label_may_stand_on_the_next_line():
    assert boxes("<loc0020><loc0010><loc0040><loc0030>\ncat\ndog") == [
        ("box", (10, 20, 30, 40), "cat", "1024")
    ]


def test_the_scale_that_the_authors_state() -> None:
    found = find_regions('[{"bbox": [10, 20, 30, 40]}]', SEEN, OWN, "processed")
    assert found is not None
    assert (found.scale, found.why) == ("processed", "the model's authors say so")
    tagged = find_regions("<box>(10,20),(30,40)</box>", SEEN, OWN, "processed")
    assert tagged is not None and tagged.regions[0].scale == "1000"


def test_several_boxes_of_one_label_in_thousandths():
    """As Florence-2 writes a label that it finds twice; compared with transformers' reading."""
    from transformers.models.florence2.processing_florence2 import Florence2PostProcessor

    text = (
        "car<loc_52><loc_332><loc_932><loc_774>"
        "door<loc_710><loc_576><loc_845><loc_770><loc_1><loc_2><loc_3><loc_4>"
    )
    reader = Florence2PostProcessor.__new__(Florence2PostProcessor)
    reader.quantize_bins = (1000, 1000)
    theirs = reader.parse_description_with_bboxes_from_text_and_spans(text, (1000, 1000))
    assert [(label, [int(v) for v in values]) for _, values, label, _ in boxes(text)] == [
        (re.sub("<.*", "", one["cat_name"]), one["bbox"]) for one in theirs
    ]


def test_an_outline_is_the_box_around_it():
    text = "<poly><loc_10><loc_20><loc_30><loc_25><loc_20><loc_40></poly>"
    assert boxes(text) == [("box", (10.5, 20.5, 30.5, 40.5), "", "1000")]
