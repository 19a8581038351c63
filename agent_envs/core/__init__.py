"""What every environment is built on: messages, tools, formats, contexts, rewards."""
