"""Handle what a chat is made of: messages, templates, tools, thoughts, images, constraints."""
