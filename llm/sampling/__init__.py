"""Sampling: options, the sampler, answers that follow a JSON schema or a grammar."""
