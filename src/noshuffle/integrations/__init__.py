"""Training frameworks: their loops as they are, private steps inside.

`huggingface` has `PrivateTrainer` (extra `huggingface`), `lightning` has `PrivateCallback` (extra
`lightning`). Each imports its framework, so nothing here imports them.
"""
