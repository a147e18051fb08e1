// Converts Markdown of answers to safe HTML: no scripts, no forms, and nothing that is loaded from
// elsewhere.
import DOMPurify from "dompurify";
import MarkdownIt from "markdown-it";

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });

const ALLOWED = {
  ALLOWED_TAGS: [
    "p",
    "br",
    "hr",
    "strong",
    "em",
    "s",
    "code",
    "pre",
    "blockquote",
    "a",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "ul",
    "ol",
    "li",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
  ],
  ALLOWED_ATTR: ["href", "start", "title", "target", "rel"],
  RETURN_TRUSTED_TYPE: true,
};

// The browser would fetch a picture from another machine; its address is shown instead.
markdown.renderer.rules.image = (tokens, index) =>
  markdown.utils.escapeHtml(`[${tokens[index]!.content}](${tokens[index]!.attrGet("src") ?? ""})`);

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

export function render(text: string): string {
  return DOMPurify.sanitize(markdown.render(text), ALLOWED) as unknown as string;
}
