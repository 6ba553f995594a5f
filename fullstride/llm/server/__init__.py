"""OpenAI-compatible server: FastAPI routes, and a request manager between asyncio and the engine's thread."""
