#!/usr/bin/env python3
"""A stand-in for SGLang: a small real model on the GPU behind the OpenAI API, and gigabytes held beside it.

It is not SGLang. What it shares with one is what the roll-out sees: a unit that holds GPU memory, a port,
/v1/models and completions that the model really makes. Needs torch and transformers, nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

GIB = 2**30


class Model:
    """The target, greedy, one request at a time."""

    def __init__(self, folder: str, gib: float):
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
        # As a server's KV cache would: taken at once, kept until the process ends.
        self.held = torch.zeros(int(gib * GIB), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def complete(self, prompt: str, tokens: int) -> str:
        """The continuation of `prompt`, at most `tokens` tokens."""
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        with self.torch.inference_mode():
            found = self.torch.tensor([ids], device="cuda")
            for _ in range(tokens):
                logits = self.model(input_ids=found, use_cache=False).logits
                found = self.torch.cat([found, logits[:, -1:].argmax(-1)], 1)
        return self.tokenizer.decode(found[0, len(ids) :].tolist())


def handler(model: Model, model_id: str) -> type[BaseHTTPRequestHandler]:
    """The HTTP side of it."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, body: dict | str, kind: str = "application/json", status: int = 200) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.answer({"object": "list", "data": [{"id": model_id, "object": "model"}]})
            elif self.path == "/health":
                self.answer("", "text/plain")
            else:
                self.answer({"error": "not found"}, status=404)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                self.answer({"error": "not found"}, status=404)
                return
            if asked.get("model") != model_id:
                self.answer({"error": f"no model {asked.get('model')}"}, status=404)
                return
            text = model.complete(asked["prompt"], asked.get("max_tokens", 16))
            choice = {"index": 0, "text": text, "finish_reason": "length"}
            body = {
                "id": "stand-in",
                "object": "text_completion",
                "created": int(time.time()),
                "model": model_id,
            }
            body["choices"] = [choice]
            if asked.get("stream"):
                self.answer(f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n", "text/event-stream")
            else:
                self.answer(body)

    return Handler


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-id", required=True)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--gib", type=float, required=True, help="GPU memory held beside the model")
    args = parser.parse_args()
    model = Model(args.model, args.gib)
    for _ in range(2):  # the first loads its kernels
        begin = time.monotonic()
        model.complete("import os", 16)
    print(
        f"stand-in for SGLang: ready on port {args.port}, {args.gib} GiB held, "
        f"16 tokens in {time.monotonic() - begin:.3f} s",
        flush=True,
    )
    # One thread for all: CUDA libraries set themselves up anew in each.
    HTTPServer.request_queue_size = 64
    HTTPServer(("0.0.0.0", args.port), handler(model, args.model_id)).serve_forever()  # noqa: S104


if __name__ == "__main__":
    main()
