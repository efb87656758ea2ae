package topology

import (
	"bytes"
	_ "embed"
	"encoding/xml"
	"fmt"
	"strings"
)

// style has the colours for light and dark themes. A viewer that ignores media queries shows the light theme.
//
//go:embed style.css
var style string

// box is a rectangle in pixels, relative to the picture's upper left corner.
type box struct{ x, y, w, h int }

// text is one line of text.
type text struct {
	class  string
	x, y   int // of the baseline
	size   int // of the font, in pixels
	font   font
	anchor string // the point of the text that is at x: "" for its start, "middle" or "end"
	value  string
}

// attribute is a data attribute of a group: the name without "data-", and the value.
type attribute = [2]string

// svg writes the elements of an SVG file. Later elements cover earlier ones.
type svg struct{ bytes.Buffer }

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a strings.Builder returns no errors
	return strings.ReplaceAll(b.String(), "&#xA;", "\n")
}

// page returns an SVG file with these elements. Screen readers read the title and the description.
func (b *svg) page(width, height int, title, description string) []byte {
	var page svg
	page.WriteString(`<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="topology-title"`)
	fmt.Fprintf(&page, ` width="%d" height="%d" viewBox="0 0 %d %d">`+"\n", width, height, width, height)
	fmt.Fprintf(&page, "<title id=\"topology-title\">%s</title>\n", escape(title))
	fmt.Fprintf(&page, "<desc>%s</desc>\n", escape(description))
	page.WriteString("<style>\n" + style + "</style>\n")
	page.rect("page", box{w: width, h: height}, 0)
	page.Write(b.Bytes())
	page.WriteString("</svg>\n")
	return page.Bytes()
}

// group writes shapes that together show one object of the node. `class` is the kind of object.
func (b *svg) group(class, title string, data []attribute, shapes func()) {
	fmt.Fprintf(b, `<g class="%s"`, class)
	for _, a := range data {
		fmt.Fprintf(b, ` data-%s="%s"`, a[0], escape(a[1]))
	}
	b.WriteString(">\n")
	if title != "" {
		fmt.Fprintf(b, "<title>%s</title>\n", escape(title))
	}
	shapes()
	b.WriteString("</g>\n")
}

// rect writes a rectangle. `radius` is that of its corners, in pixels.
func (b *svg) rect(class string, r box, radius int) {
	fmt.Fprintf(b, `<rect class="%s" x="%d" y="%d" width="%d" height="%d"`, class, r.x, r.y, r.w, r.h)
	if radius > 0 {
		fmt.Fprintf(b, ` rx="%d"`, radius)
	}
	b.WriteString("/>\n")
}

// path writes a line in the syntax of SVG path data. A stroke of 0 means the width of the class.
func (b *svg) path(class string, stroke int, data string) {
	fmt.Fprintf(b, `<path class="%s" d="%s"`, class, data)
	if stroke > 0 {
		fmt.Fprintf(b, ` stroke-width="%d"`, stroke)
	}
	b.WriteString("/>\n")
}

var fontClass = map[font]string{bold: " b", mono: " m"}

func (b *svg) text(t text) {
	if t.value == "" {
		return
	}
	fmt.Fprintf(b, `<text class="%s%s" x="%d" y="%d" font-size="%d"`, t.class, fontClass[t.font], t.x, t.y, t.size)
	if t.anchor != "" {
		fmt.Fprintf(b, ` text-anchor="%s"`, t.anchor)
	}
	fmt.Fprintf(b, ">%s</text>\n", escape(t.value))
}

// centred writes a text with its middle at x.
func (b *svg) centred(class string, x, y, size int, f font, value string) {
	b.text(text{class: class, x: x, y: y, size: size, font: f, anchor: "middle", value: value})
}

// lines writes a text in at most 3 lines, and returns the lower end.
func (b *svg) lines(class, value string, x, y, width int) (bottom int) {
	for _, line := range wrap(value, width, 12, 3) {
		b.text(text{class: class, x: x, y: y + 12, size: 12, value: line})
		y += 18
	}
	return y
}
