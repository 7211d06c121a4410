"""`/tokenizer_info`: what a client must know of the tokenizer to frame prompts itself, in the words of a model's
`tokenizer_config.json`, as vLLM has it."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.server.openapi import ERRORS
from twostroke.server.service import service_of

router = APIRouter(responses=ERRORS)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    service = service_of(request)
    tokenizer, facts = service.encoder().tokenizer, service.facts()
    info = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model": service.settings.model_name,
        "model_max_length": facts.max_context,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": tokenizer.bos_token,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token": tokenizer.eos_token,
        "eos_token_id": tokenizer.eos_token_id,
        "eos_token_ids": sorted(tokenizer.eos_token_ids),
        "unk_token": tokenizer.unknown_token,
        "pad_token": None,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.eos_token_id is not None and tokenizer.eos_token_id in tokenizer.suffix_ids,
        "additional_special_tokens": list(tokenizer.special_tokens),
        "added_tokens_decoder": tokenizer.added_tokens,
        "chat_template": tokenizer.chat_template,
    }
    return Response(msgspec.json.encode(info), media_type="application/json")
