"""Handle what a chat is made of: messages, prompts, tools, images, constraints."""
