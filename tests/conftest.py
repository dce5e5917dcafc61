"""Fixtures shared by all tests."""

import os

# before torch is imported: results on CPU depend on the number of threads, and two busy cores on not having too many
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
