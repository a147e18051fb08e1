"""Render chats by templates, and find out what a template shows."""
