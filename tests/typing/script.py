"""A script of a user, for mypy: it is read by tools/typecheck.sh and never run. Each mistake in it is
one that mypy finds: an `ignore` that is not needed is an error, too.
"""

import asyncio

from mtmd import Answer, Chat, Images, Message, MtmdError, describe, load

text: str = describe("a.png", "?", max_tokens=4, dtype="bf16")
describe("a.png", "?", max_new_tokens=4)  # type: ignore[call-arg]
describe("a.png", "?", dtype="fp8")  # type: ignore[arg-type]

with load(device="cpu", override_tensor=["a=cpu"]) as model:
    answer: Answer = model.answer(["a.png", b"..."], stop="x", system="Be brief.")
    model.answer("a.png", temperature="hot")  # type: ignore[arg-type]
    model.answer("a.png", dtype="bf16")  # type: ignore[call-arg]
    pictures: list[Images] = ["a.png", ["b.png", "c.png"]]
    answers: list[Answer] = list(model.answers(pictures, "?", progress=True))
    either: list[Answer | MtmdError] = list(model.answers(pictures, on_error="return"))
    model.answers(pictures, on_error="skip")  # type: ignore[call-overload]
    messages: list[Message] = [{"role": "user", "content": "Hello"}]
    chat: Chat = model.chat(system="Be brief.", max_tokens=4)
    stated: str = chat.ask("What is this?", image="a.png").text
    lefts: list[float] = [box.left for box in answer.boxes]
    probable: list[float] = [token.logprob for token in answer.logprobs]
    model.stream("a.png", "?", max_tokens=4)
    model.stream(messages, temperature=1)
    model.stream(messages=messages, max_token=4)  # type: ignore[call-overload]
    load(max_tokens=4)  # type: ignore[call-arg]

    async def ask() -> list[Answer]:
        async for event in model.astream(messages, top_p=0.9):
            print(event)
        async for event in model.astream("a.png", "?"):
            print(event)
        return list(await asyncio.gather(model.aanswer("a.png"), model.aanswer("b.png")))
