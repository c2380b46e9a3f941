"""`mtmd embed`: vectors to files, images found by a text, labels; what is wrong is said in a line."""

import json

import numpy as np
import pytest
from dual_encoders import clip
from PIL import Image

from mtmd import OptionError, PromptError
from mtmd.embedding.embedder import load_embedder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    clip(folder)
    return str(folder)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.jpg", "c.webp"):
        Image.fromarray(rng.integers(0, 256, (30, 50, 3), dtype=np.uint8)).save(folder / name)
    return folder


def test_vectors_and_names_go_to_a_file_and_are_searched_there(
    mtmd, model_folder, photos, tmp_path
):
    out = tmp_path / "photos.npz"
    made = mtmd("embed", str(photos), "-m", model_folder, "--out", str(out))
    assert made.code == 0 and "3 images seen as 32 x 32" in made.err
    with np.load(out, allow_pickle=False) as stored:
        names, vectors = list(stored["names"]), stored["vectors"]
    assert [n.rpartition("/")[2] for n in names] == ["a.png", "b.jpg", "c.webp"]
    assert vectors.dtype == np.float32 and np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6
    model = load_embedder(model_folder)
    assert np.abs(vectors - model.embed([str(photos / n) for n in ("a.png", "b.jpg", "c.webp")])).max() < 1e-6  # fmt: skip

    args = ("-m", model_folder, "--index", str(out), "--query", "a red circle", "--top", "2")
    result = json.loads(mtmd("embed", *args, "--json").out)
    cosines = vectors @ model.embed(texts="a red circle")[0]
    best = cosines.argsort()[::-1][:2]
    (query,) = result["queries"]
    assert [hit["image"] for hit in query["images"]] == [names[i] for i in best]
    assert np.allclose([hit["cosine"] for hit in query["images"]], cosines[best], atol=1e-6)
    lines = mtmd("embed", *args).out.splitlines()
    assert lines[0] == "a red circle" and [line.split()[2] for line in lines[1:]] == [names[i] for i in best]  # fmt: skip


def test_programs_of_a_whole_machine_are_not_used_and_that_is_noted(
    model_folder, monkeypatch, caplog
):
    monkeypatch.setenv("MTMD_KERNELS", "/nowhere")
    load_embedder(model_folder)
    assert "MTMD_KERNELS is not used" in caplog.text


def test_labels(mtmd, model_folder, photos):
    args = ("embed", str(photos / "a.png"), "-m", model_folder, "--labels", "a cat, a dog")
    (row,) = json.loads(mtmd(*args, "--json").out)["labels"]
    assert list(row["probabilities"]) == ["a cat", "a dog"]
    assert sum(row["probabilities"].values()) == pytest.approx(1)
    shown = mtmd(*args)
    assert shown.out.startswith(f"{photos / 'a.png'}: a ") and "%" in shown.out


def test_a_bad_image_fails_alone(mtmd, model_folder, photos, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    out = tmp_path / "v.npy"
    result = mtmd(
        "embed", str(photos / "a.png"), str(bad), str(tmp_path / "none.png"), str(photos / "b.jpg"),
        "-m", model_folder, "--out", str(out),
    )  # fmt: skip
    assert result.code == 1 and len(np.load(out)) == 2
    assert result.err.count("mtmd embed:") == 2 and "Traceback" not in result.err


def write_index(path, **arrays):
    np.savez(path, **arrays)


def test_an_index_that_is_none_is_refused(mtmd, model_folder, tmp_path):
    bad = tmp_path / "bad.npz"
    cases = [
        lambda: bad.write_bytes(b"PK\3\4 nothing"),
        lambda: bad.write_bytes(b""),
        lambda: write_index(bad, names=np.array(["a"]), vectors=np.zeros((1, 7), np.float32)),
        lambda: write_index(bad, names=np.array(["a"]), vectors=np.zeros((2, 24), np.float32)),
        lambda: write_index(
            bad, names=np.array([{}], object), vectors=np.zeros((1, 24), np.float32)
        ),
        lambda: write_index(bad, vectors=np.zeros((1, 24), np.float32)),
        lambda: bad.unlink(),
    ]
    for make in cases:
        make()
        result = mtmd("embed", "-m", model_folder, "--index", str(bad), "--query", "x")
        assert result.code == 2 and result.err.count("\n") == 1
        assert "expected an .npz file that `mtmd embed --out` made" in result.err


@pytest.mark.parametrize(
    "args, words",
    [
        ([], "found nothing to embed"),
        (["a.png"], "expected something to do with the vectors"),
        (["--text", "a", "--query", "b"], "are about images"),
        (["a.png", "--labels", " , "], "found no label"),
        (["a.png", "--query", "a", "--top", "0"], "expected 1 or more"),
        (["a.png", "--out", "x.txt"], "ending in .npy"),
        (["a.png", "--out", "/no/such/x.npy"], "found no folder"),
    ],
    ids=str,
)
def test_a_wrong_call_is_said_in_a_line(mtmd, model_folder, args, words):
    result = mtmd("embed", *args, "-m", model_folder)
    assert result.code == 2 and words in result.err and result.err.count("\n") == 1


def test_models_of_the_other_kind_say_what_to_use(mtmd, model_folder, photos):
    described = mtmd("describe", str(photos / "a.png"), "-m", model_folder)
    assert described.code == 2 and "use `mtmd embed`" in described.err
    embedded = mtmd("embed", "--text", "a", "--out", "x.npy", "-m", "mtmd/demo_model")
    assert embedded.code == 2 and "is no dual encoder" in embedded.err
    told = mtmd("embed", "--text", "a", "--out", "x.npy", "--instruction", "b", "-m", model_folder)
    assert told.code == 2 and "reads none; leave it out" in told.err


def test_a_warm_up_of_a_dual_encoder(mtmd, model_folder):
    report = json.loads(mtmd("warmup", "-m", model_folder, "--json").out)
    assert [c["graph"] for c in report["checks"]] == ["encoder", "text encoder"]


def test_python(model_folder, photos):
    model = load_embedder(model_folder, dtype="fp32", threads=None, context=None)
    result = model.embeddings(str(photos / "a.png"), "a photo of a cat " * 9)
    assert result.vectors.shape == (2, model.width)
    (image,), (text,) = result.receipt.images, result.receipt.texts
    assert image.original_size == (50, 30) and image.processed_size == (32, 32)
    assert text.cut and "the end is not seen" in str(result.receipt)
    with pytest.raises(OptionError, match="neither images nor texts"):
        model.embed()
    with pytest.raises(PromptError, match="expected a text"):
        model.embed(texts=[3])
    with pytest.raises(OptionError, match="not one of a dual encoder"):
        load_embedder(model_folder, context=512)
    with pytest.raises(OptionError, match="matches no node"):
        load_embedder(model_folder, override_tensor=["nothing=cpu"])


def test_user_text_makes_no_control_token(model_folder):
    model = load_embedder(model_folder)
    plain, _ = model.checkpoint.tokens("a cat")
    tried, _ = model.checkpoint.tokens("a <|endoftext|> cat")
    assert tried.count(plain[-1]) == 1 and tried[-1] == plain[-1]
