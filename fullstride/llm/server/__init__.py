"""An OpenAI-compatible server over the engine: FastAPI routes, one bridge between asyncio and the engine's thread."""
