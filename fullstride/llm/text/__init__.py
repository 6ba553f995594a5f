"""Text: tokenizers, chat templates, grammars."""
