package topology

import (
	"bytes"
	_ "embed"
	"encoding/xml"
	"fmt"
	"strings"
)

// style has the colours for light and dark themes. A program that knows no media queries shows the light one.
//
//go:embed style.css
var style string

// box is a rectangle, in pixels from the picture's upper left corner.
type box struct{ x, y, w, h int }

// point is x and y in pixels.
type point = [2]int

// text is one line of text.
type text struct {
	class  string
	x, y   int // of the baseline
	size   int // of the font, in pixels
	font   font
	anchor string // the point of the text that x is: "" is the start, or "middle" or "end"
	value  string
}

func (t text) moved(dx, dy int) text {
	t.x, t.y = t.x+dx, t.y+dy
	return t
}

// attribute is a data attribute of a group: its name without "data-", and its value.
type attribute = [2]string

// svg writes the elements of an SVG file. Later elements cover earlier ones.
type svg struct{ bytes.Buffer }

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a strings.Builder takes everything
	return strings.ReplaceAll(b.String(), "&#xA;", "\n")
}

// begin writes the head of the file. Screen readers read the title and the description.
func (b *svg) begin(width, height int, title, description string) {
	fmt.Fprintf(b, `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="topology-title topology-desc"`+
		` width="%d" height="%d" viewBox="0 0 %d %d">`+"\n", width, height, width, height)
	fmt.Fprintf(b, "<title id=\"topology-title\">%s</title>\n", escape(title))
	fmt.Fprintf(b, "<desc id=\"topology-desc\">%s</desc>\n", escape(description))
	b.WriteString("<style>\n" + style + "</style>\n")
}

func (b *svg) end() { b.WriteString("</svg>\n") }

// group writes shapes that are one thing of the node. The class names the kind of thing.
func (b *svg) group(class, title string, data []attribute, shapes func()) {
	b.WriteString("<g")
	if class != "" {
		fmt.Fprintf(b, ` class="%s"`, class)
	}
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

// rect writes a rectangle. Its corners are rounded with a radius in pixels.
func (b *svg) rect(class string, r box, radius int) {
	fmt.Fprintf(b, `<rect class="%s" x="%d" y="%d" width="%d" height="%d"`, class, r.x, r.y, r.w, r.h)
	if radius > 0 {
		fmt.Fprintf(b, ` rx="%d"`, radius)
	}
	b.WriteString("/>\n")
}

// path writes a line through points, with rounded corners. A stroke of 0 is the width of the class.
func (b *svg) path(class string, stroke int, points ...point) {
	fmt.Fprintf(b, `<path class="%s" d="`, class)
	for i, at := range points {
		switch {
		case i == 0:
			fmt.Fprintf(b, "M%d %d", at[0], at[1])
		case i == len(points)-1:
			fmt.Fprintf(b, "L%d %d", at[0], at[1])
		default:
			in, out := toward(at, points[i-1]), toward(at, points[i+1])
			fmt.Fprintf(b, "L%d %dQ%d %d %d %d", in[0], in[1], at[0], at[1], out[0], out[1])
		}
	}
	b.WriteString(`"`)
	if stroke > 0 {
		fmt.Fprintf(b, ` stroke-width="%d"`, stroke)
	}
	b.WriteString("/>\n")
}

// toward returns the point where the corner at from begins to be round: 6 pixels from it, but at most half the way to
// the next one. The two points have one coordinate in common.
func toward(from, to point) point {
	const radius = 6
	for i := range from {
		d := to[i] - from[i]
		step := min(max(d, -radius), radius)
		if step*2 > d && d > 0 || step*2 < d && d < 0 {
			step = d / 2
		}
		from[i] += step
	}
	return from
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

// centred writes a text whose middle is at x.
func (b *svg) centred(class string, x, y, size int, f font, value string) {
	b.text(text{class: class, x: x, y: y, size: size, font: f, anchor: "middle", value: value})
}

func (b *svg) texts(list []text, dx, dy int) {
	for _, t := range list {
		b.text(t.moved(dx, dy))
	}
}
