"""Training frameworks: their loops as they are, private steps inside.

`huggingface` has `PrivateTrainer` and `huggingface_callback` its callback form (extra
`huggingface`), `lightning` has `PrivateCallback` (extra `lightning`). Each imports its framework,
so nothing here imports them.
"""
