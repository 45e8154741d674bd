"""Images in chat requests: prepared as training prepares them, and refused before they cost anything."""

from __future__ import annotations

import base64
import io
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image

from anytron.config.imports import resolve
from anytron.config.schema import ModelSection
from anytron.serving import conversation
from anytron.serving.limits import Limits
from anytron.task.data.pretrained import TOKENIZER
from anytron.task.data.vision import load_vision
from anytron.workers.engines.rollout_engine import Response, SamplingParams
from tests.core.serving.served import serving
from tests.core.task.data.test_vision import IMAGE, PLACE, VIDEO, vision_config

SHAPES = Path(__file__).parents[3] / "examples" / "count_shapes.py"
EOS = 7
TEMPLATE = """{%- for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{{ PLACE if part.type == 'image' else part.text }}{% endfor %}{% endif %}
{%- if m.role == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}
{{- '?' if add_generation_prompt }}""".replace("PLACE", repr(PLACE))
SAMPLING = SamplingParams(max_new_tokens=8, end_token_ids=(EOS,), pad_token_id=8)


class Seer:
    """Answers ``3``, or these tokens, and keeps what it was asked."""

    def __init__(self):
        self.seen, self.waiting, self.tokens = [], {}, (2, EOS)

    def ask(self, questions, answered):
        numbers = range(len(self.seen), len(self.seen) + len(questions))
        self.waiting |= dict.fromkeys(numbers, answered)
        self.seen += [prompt for prompt, _, _ in questions]
        return list(numbers)

    def poll(self, seconds):
        asked, self.waiting = self.waiting, {}
        for number, answered in asked.items():
            answered(number, Response(self.tokens, (-0.5,) * len(self.tokens), "stop", (0,) * len(self.tokens)))
        return []

    def cancel(self, numbers):
        for number in numbers:
            self.waiting.pop(number, None)


@contextmanager
def seeing(limits=None, *, takes_images=True):
    tokenizer = resolve(f"{SHAPES}:tokenizer", TOKENIZER)()
    tokenizer.chat_template = TEMPLATE
    section = ModelSection(config={"model_type": "qwen2_5_vl"}, tokenizer="t", processor=f"{SHAPES}:image_processor")
    vision = load_vision(section, vision_config(), tokenizer, pytest.fail) if takes_images else None
    with serving(Seer(), tokenizer, SAMPLING, limits or Limits(), vision=vision) as server:
        server.vision = vision
        yield server


@pytest.fixture(scope="module")
def server():
    with seeing() as one:
        yield one


def picture(width, height, colour=7):
    return Image.new("RGB", (width, height), (colour, 90, 200))


def url_of(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def shown(*parts, role="user"):
    """A message of texts, pictures and URLs."""
    content = []
    for part in parts:
        if isinstance(part, str) and ":" not in part:
            content.append({"type": "text", "text": part})
        else:
            url = part if isinstance(part, str) else url_of(part)
            content.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": role, "content": content}


def refused(answer):
    assert answer.status_code in (400, 409), answer.text
    return answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["message"]


def test_a_conversation_with_images_goes_on_with_what_training_would_make_of_them(server):
    _, key = server.session()
    first, second = picture(48, 32), picture(16, 32, 200)
    messages = [shown(first, "1")]
    answer = server.chat(key, messages)
    assert answer.status_code == 200, answer.text
    messages += [answer.json()["choices"][0]["message"], shown("2", second, role="tool")]
    assert server.chat(key, messages).status_code == 200

    begun, later = server.pool.seen[-2:]
    assert begun.tokens == (12, *[IMAGE] * 6, 14, 0, 6)
    assert later.tokens == (*begun.tokens, *server.pool.tokens, 1, 12, *[IMAGE] * 2, 14, 6)
    for prompt, pictures in ((begun, [first]), (later, [first, second])):
        expected = server.vision.patches(pictures, "here")
        assert torch.equal(prompt.images.pixel_values, expected.pixel_values)
        assert torch.equal(prompt.images.grid_thw, expected.grid_thw)
    (session,) = server.sessions.values()
    (branch,) = session.branches()
    assert branch.tokens == (*later.tokens, *server.pool.tokens)
    assert torch.equal(branch.images.pixel_values, later.images.pixel_values)


@pytest.mark.parametrize("sabotaged", [False, True])
def test_another_image_is_another_history(server, monkeypatch, sabotaged):
    if sabotaged:  # the twin: images are not part of what is compared
        monkeypatch.setattr(conversation, "digests_of", lambda message: [])
    _, key = server.session()
    said = server.chat(key, [shown(picture(32, 32), "1")]).json()["choices"][0]["message"]
    changed = [shown(picture(32, 32, 8), "1"), said, {"role": "user", "content": "2"}]
    answer = server.chat(key, changed)
    assert answer.status_code == 200 if sabotaged else refused(answer)[:2] == (409, "history_not_recorded")


@pytest.mark.parametrize("url", ["http://127.0.0.1/a.png", "https://example.org/a.png", "file:///etc/passwd", "a:b"])
def test_nothing_is_fetched(server, url):
    before = len(server.pool.seen)
    status, code, why = refused(server.chat(messages=[shown(url)]))
    assert (status, code) == (400, "image_not_sent")
    assert url[:20] in why
    assert "data:image/png;base64" in why
    assert len(server.pool.seen) == before


NOT_READ = {
    "data:image/png;base64,@@": "not valid base64",
    "data:image/png;base64,": "cannot be read",
    "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(): "cannot be read",
}


@pytest.mark.parametrize("url", NOT_READ)
def test_what_is_no_picture_is_refused(server, url):
    assert NOT_READ[url] in refused(server.chat(messages=[shown(url)]))[2]


def test_other_forms_of_images_are_refused(server):
    part = {"type": "image_url", "image_url": {"url": url_of(picture(16, 16)), "detail": "high"}}
    assert "detail=auto" in refused(server.chat(messages=[{"role": "user", "content": [part]}]))[2]
    said = shown(picture(16, 16), role="system")
    assert "role system" in refused(server.chat(messages=[said, {"role": "user", "content": "1"}]))[2]
    assert "an image is" in refused(server.chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]))[2]


def test_too_many_pixels_are_refused_before_they_are_decoded():
    with seeing(Limits(pixels=64 * 64)) as server:
        bomb = Image.new("1", (8000, 8000))
        for pictures in ([bomb], [picture(64, 32), picture(64, 33)]):
            _, code, why = refused(server.chat(messages=[shown(*pictures)]))
            assert (code, "more than 4096 pixels" in why) == ("not_tokenised", True)
        assert server.chat(messages=[shown(picture(64, 32), picture(64, 32))]).status_code == 200


def test_a_model_for_text_takes_no_images():
    with seeing(takes_images=False) as server:
        assert refused(server.chat(messages=[shown(picture(16, 16))]))[1] == "no_images"
        assert server.chat(messages=[shown("1")]).status_code == 200


@pytest.mark.parametrize("token", [IMAGE, VIDEO])
def test_tokens_of_images_come_with_images_alone(server, token):
    text = server.endpoint.model.tokenizer.convert_ids_to_tokens(token)
    refused(server.chat(messages=[{"role": "user", "content": text}]))
    for route, body in {
        "/v1/completions": {"model": "toy", "prompt": [1, token]},
        "/inference/v1/generate": {"model": "toy", "token_ids": [1, token]},
    }.items():
        assert refused(server.ask(route, body))[1] == "image_not_sent"
        plain = {name: [1, 2] if isinstance(value, list) else value for name, value in body.items()}
        assert server.ask(route, plain).status_code == 200


@pytest.mark.parametrize("token", [IMAGE, VIDEO])
def test_an_image_token_that_the_model_wrote_ends_the_conversation(server, monkeypatch, token):
    monkeypatch.setattr(server.pool, "tokens", (token, EOS))
    _, key = server.session()
    said = server.chat(key, [shown("1")]).json()["choices"][0]["message"]
    answer = server.chat(key, [shown("1"), said, shown("2")])
    assert refused(answer)[:2] == (409, "image_token_written")
    assert answer.headers["x-should-retry"] == "false"


def test_a_stream_about_images_has_one_part(server, monkeypatch):
    monkeypatch.setattr(server.pool, "tokens", (IMAGE, 2, EOS))
    before = len(server.pool.seen)
    with server.client().chat.completions.create(
        model="toy", messages=[shown(picture(16, 16), "1")], stream=True, max_tokens=8
    ) as stream:
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "stop"
    assert len(server.pool.seen) == before + 1
