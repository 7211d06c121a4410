"""A plan as a program reads it: plain numbers, seconds and bytes. `twostroke plan --json` prints it, and the live page
shows it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from twostroke.planner.estimate import Estimate


def as_json(record: dict[str, Any]) -> str:
    """The same text wherever it is asked for."""
    return json.dumps(record, indent=2)


def record(result: Estimate) -> dict[str, Any]:
    deployment, memory, company = result.deployment, result.memory, result.company
    shape = deployment.shape
    return {
        "model": deployment.model,
        "parameters": shape.num_parameters,
        "active_parameters": shape.active_parameters,
        "weights": "file" if deployment.own_shape is not None else deployment.formats.weights,
        "decode_weights": None if shape.decode_weights is None else asdict(shape.decode_weights),
        "kv": deployment.formats.kv,
        "device": deployment.device.name,
        "devices": deployment.num_devices,
        "tensor_parallel": deployment.tensor_parallel,
        "pipeline_parallel": deployment.pipeline_parallel,
        "expert_parallel": deployment.expert_parallel,
        "replicas": deployment.replicas,
        "arithmetic": deployment.arithmetic,
        "usd_per_hour": deployment.price_per_hour_usd,
        "input_tokens": result.lengths.input_tokens,
        "cached_tokens": result.lengths.cached_tokens,
        "output_tokens": result.lengths.output_tokens,
        "memory": {name: getattr(memory, name) for name in memory.__slots__},
        "alone": {
            name: {"floor_s": one.floor_s, "expected_s": one.expected_s}
            for name, one in (
                ("ttft", result.alone.ttft),
                ("tpot", result.alone.tpot),
                ("request", result.alone.request),
            )
        }
        | {"minimum_decode_s": result.alone.minimum_decode_s},
        "in_company": None
        if company is None
        else {
            "floor": {name: getattr(company.floor, name) for name in company.floor.__slots__},
            "expected": {name: getattr(company.expected, name) for name in company.expected.__slots__},
            "usd_per_million_output_tokens": company.usd_per_million_output_tokens,
            "usd_per_million_tokens": company.usd_per_million_tokens,
        },
        "roofline": {
            "ridge_flops_per_byte": result.ridge,
            "prefill": result.prefill.intensity,
            "decode_alone": result.decode_alone.intensity,
            "decode_in_company": result.decode_in_company.intensity if result.decode_in_company else None,
        },
        "bound": result.load.bound if result.load else None,
        "prefill_share": result.load.prefill_share if result.load else None,
        "advice": list(result.load.advice) if result.load else [],
        "efficiency": {
            "prefill_share": result.alone.ttft.share,
            "decode_share": result.alone.tpot.share,
            "source": result.efficiency_source,
            "error": result.efficiency_error,
        },
        "sources": list(deployment.device.sources),
        "notes": list(result.notes),
    }
