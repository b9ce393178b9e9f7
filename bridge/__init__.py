"""What crosses between lorabridge's processes: frozen values, their codecs, the store, the stream and the ledger.

Nothing in this room imports torch, trl or vllm when it is imported.
"""
