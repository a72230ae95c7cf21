"""Loggers below vLLM's own, so that its format and its level settings apply."""

import logging


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(f"vllm.{name}")
