"""The tiny random models of tests/fixtures/models, one module for each architecture."""

from __future__ import annotations

from tools.tiny_models import (
    bailingmoe2,
    deepseek2,
    deepseek32,
    dots1,
    ernie4_5_moe,
    gemma4,
    glm4moe,
    gpt_oss,
    hunyuan_moe,
    hy_v3,
    llama,
    minimax_m2,
    mistral4,
    olmoe,
    qwen2moe,
    qwen3,
    qwen35,
)
from tools.tiny_models.model import TinyModel

__all__ = ["DRAFTERS", "MODELS", "TinyModel"]

DRAFTERS = gemma4.DRAFTERS  # each guesses tokens for one of the models

MODELS: tuple[TinyModel, ...] = (
    *qwen3.MODELS,
    *olmoe.MODELS,
    *llama.MODELS,
    *qwen2moe.MODELS,
    *gpt_oss.MODELS,
    *deepseek2.MODELS,
    *qwen35.MODELS,
    *glm4moe.MODELS,
    *ernie4_5_moe.MODELS,
    *dots1.MODELS,
    *minimax_m2.MODELS,
    *bailingmoe2.MODELS,
    *hy_v3.MODELS,
    *hunyuan_moe.MODELS,
    *deepseek32.MODELS,
    *mistral4.MODELS,
    *gemma4.MODELS,
)
