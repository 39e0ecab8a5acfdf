"""Training frameworks: their loops as they are, private steps inside.

`huggingface` has `PrivateTrainer` (extra `huggingface`). It imports its framework, so nothing here
imports it.
"""
