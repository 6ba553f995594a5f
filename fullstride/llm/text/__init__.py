"""Text processing: tokenizers, chat templates, grammars."""
