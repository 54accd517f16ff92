"""dtrain: one YAML says where every axis of a transformer lives; the compiler inserts the communication."""

__version__ = "0.1.0"
