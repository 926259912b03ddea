"""A trace of prompts with pictures: their tokens are one mark each, and the pictures stand beside
the text.
"""

import base64
import io
import json
import re
from dataclasses import replace

import pytest
import torch
from chromium import CHROMIUM, chromium
from pictured_models import IMAGE, ROWS, build, prompts
from PIL import Image

from specdec import SpeculativeGenerator
from specdec.lab.trace import Trace

PICTURES = [
    [Image.linear_gradient("L").resize((900, 600))],
    [],
    [Image.new("RGBA", (30, 40), (200, 30, 30, 255)), Image.new("P", (50, 20))],
]
"""Of the rows."""


@pytest.fixture(name="traces", scope="module")
def _traces():
    """Of a family whose pictures are of different sizes, and of one where an id beyond the
    vocabulary could stand.
    """
    found = {}
    for name in ("qwen3_vl", "gemma3"):
        generator = SpeculativeGenerator(build(name), "lookup")
        options = {"max_new_tokens": 6, "trace": True, "num_return_sequences": 2}
        options |= {"do_sample": True, "seed": 0}
        found[name] = generator.generate(**prompts(name), **options).trace
    return found


def rows_of(trace, file, **options):
    trace.to_html(file, **options)
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(", text)  # nothing is fetched
    return json.loads(re.search(r'id="trace">(.*?)</script>', text)[1])["rows"]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_placeholders_are_the_tokens_of_pictures(name, traces):
    """Two rows of each prompt; the ids say where pictures are."""
    trace = traces[name]
    assert len(trace) == 2 * len(ROWS)
    for ids, runs in zip(trace.prompts, trace.placeholders, strict=True):
        marked = [first <= i < end for first, end in runs for i in range(len(ids))]
        marked = torch.tensor(marked).view(len(runs), len(ids)).any(dim=0).tolist()
        assert marked == [token == IMAGE for token in ids]


def test_a_picture_is_one_mark(traces, tmp_path):
    found = rows_of(traces["qwen3_vl"], tmp_path / "page.html")
    assert found[2]["prompt"] == found[3]["prompt"]
    assert found[0]["prompt"] == ["5 6 7 91 ", {"fold": "no text, 4 tokens"}, "92 8 9 10 11 "]
    assert found[2]["prompt"] == ["12 13 14 15 16 "]
    ids = found[4]["prompt"]
    assert [part["fold"] for part in ids[1::2]] == ["no text, 4 tokens", "no text, 6 tokens"]
    assert found[0]["pictures"] == []


def test_pictures_stand_beside_the_text_small_and_whole(traces, tmp_path):
    doubled = [own for own in PICTURES for _ in range(2)]
    trace = traces["qwen3_vl"].with_pictures(doubled)
    found = rows_of(trace, tmp_path / "page.html")
    assert [len(row["pictures"]) for row in found] == [1, 1, 0, 0, 2, 2]
    ids = found[4]["prompt"]
    assert [part["fold"] for part in ids[1::2]] == ["picture 1, 4 tokens", "picture 2, 6 tokens"]
    (one,) = found[0]["pictures"]
    assert one["size"] == "900 x 600"
    kind, data = one["data"].split(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as small:
        assert small.size == (320, 213)
        assert small.getpixel((0, 0))[0] < 20 < 235 < small.getpixel((0, 212))[0]
    with pytest.raises(ValueError, match="pictures has 3 lists for the 6 rows of the trace"):
        traces["qwen3_vl"].with_pictures(PICTURES)
    more = replace(trace, pictures=[[*own, *own] for own in doubled])
    found = rows_of(more, tmp_path / "page.html")  # more pictures than runs: no numbers
    assert found[0]["prompt"][1] == {"fold": "a picture, 4 tokens"}


def test_a_file_keeps_the_marks_and_not_the_pictures(traces, tmp_path):
    trace = traces["gemma3"].with_pictures([[]] * 6)
    trace.to_jsonl(tmp_path / "trace.jsonl")
    again = Trace.from_jsonl(tmp_path / "trace.jsonl")
    assert again.placeholders == trace.placeholders
    assert not again.pictures
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    header["placeholders"].pop()
    (tmp_path / "trace.jsonl").write_text("\n".join([json.dumps(header), *lines[1:]]))
    with pytest.raises(ValueError, match=r"line 1.*expected placeholders of each row"):
        Trace.from_jsonl(tmp_path / "trace.jsonl")


def test_rows_of_a_picture_that_one_token_parts_are_one_mark(traces, tmp_path):
    trace, (first, end) = traces["qwen3_vl"], traces["qwen3_vl"].placeholders[0][0]
    parted = [[(first, first + 1), (first + 2, end)], *trace.placeholders[1:]]
    found = rows_of(replace(trace, placeholders=parted), tmp_path / "page.html")
    assert found[0]["prompt"][1] == {"fold": f"no text, {end - first} tokens"}


def test_embeddings_are_one_mark():
    model = build("llava")
    embeds = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    options = {"inputs_embeds": embeds, "max_new_tokens": 3, "trace": True}
    trace = SpeculativeGenerator(model, None).generate(**options).trace
    assert trace.placeholders == [[(0, 5)]]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_reader_sees_pictures_and_marks(traces, tmp_path):
    trace = traces["qwen3_vl"].with_pictures([own for own in PICTURES for _ in range(2)])
    trace.to_html(tmp_path / "page.html")
    with chromium(tmp_path / "profile") as browser:
        browser.open(tmp_path / "page.html")
        sizes = "[...document.images].map(one => one.naturalWidth)"
        assert browser.run(sizes) == [320]
        assert browser.run("at('pictures').innerText") == "picture 1, 900 x 600"
        assert "5 6 7 91 picture 1, 4 tokens92 8" in browser.run("at('text').innerText")
        for row, count in ((2, 0), (4, 2)):
            browser.run(f"at('row').value = {row}, at('row').dispatchEvent(new Event('change'))")
            assert len(browser.run(sizes)) == count
        marks = browser.run("[...document.querySelectorAll('.fold')].map(one => one.innerText)")
        assert marks == ["picture 1, 4 tokens", "picture 2, 6 tokens"]
        long = ["a" * 500, {"fold": "picture 1, 4 tokens"}, "b" * 400]
        cut = browser.run(
            f"JSON.stringify(cut({json.dumps(long)}).map(all => all.map(one => "
            "one.textContent ?? one)))"
        )
        assert json.loads(cut) == [["a" * 300], ["a" * 200, long[1]["fold"], "b" * 400]]
