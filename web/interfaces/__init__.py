"""Interfaces: OpenAI's chat completions and Responses, Anthropic's Messages, Ollama's and
llama.cpp's routes; each reads requests into one form and writes answers in its own.
"""
