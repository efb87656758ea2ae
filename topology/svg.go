package topology

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"strings"
)

// WriteSVG writes the picture as an SVG file that needs nothing else: no script, no font, no style sheet.
func (p Picture) WriteSVG(w io.Writer) error {
	var b writer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="topology-title topology-desc"`+
		` width="%d" height="%d" viewBox="0 0 %d %d">`+"\n", p.Width, p.Height, p.Width, p.Height)
	b.element("title", ` id="topology-title"`, p.Title)
	b.element("desc", ` id="topology-desc"`, p.Description)
	b.WriteString("<style>\n" + style + "</style>\n")
	b.shapes(p.Shapes)
	b.WriteString("</svg>\n")
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write the picture: %w", err)
	}
	return nil
}

type writer struct{ bytes.Buffer }

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a strings.Builder takes everything
	return strings.ReplaceAll(b.String(), "&#xA;", "\n")
}

func (b *writer) element(name, attributes, content string) {
	fmt.Fprintf(b, "<%s%s>%s</%s>\n", name, attributes, escape(content), name)
}

func (b *writer) shapes(list []Shape) {
	for _, s := range list {
		switch s := s.(type) {
		case Group:
			b.group(s)
		case Rect:
			b.rect(s)
		case Path:
			b.path(s)
		case Text:
			b.text(s)
		}
	}
}

func (b *writer) group(g Group) {
	b.WriteString("<g")
	if g.Class != "" {
		fmt.Fprintf(b, ` class="%s"`, escape(g.Class))
	}
	for _, kv := range g.Data {
		fmt.Fprintf(b, ` data-%s="%s"`, kv[0], escape(kv[1]))
	}
	b.WriteString(">\n")
	if g.Title != "" {
		b.element("title", "", g.Title)
	}
	b.shapes(g.Shapes)
	b.WriteString("</g>\n")
}

func (b *writer) rect(r Rect) {
	fmt.Fprintf(b, `<rect class="%s" x="%d" y="%d" width="%d" height="%d"`, r.Class, r.X, r.Y, r.W, r.H)
	if r.CornerRadius > 0 {
		fmt.Fprintf(b, ` rx="%d"`, r.CornerRadius)
	}
	b.WriteString("/>\n")
}

// corner is the radius of a path's corners, in pixels.
const corner = 6

func (b *writer) path(p Path) {
	fmt.Fprintf(b, `<path class="%s" d="`, p.Class)
	for i, at := range p.Points {
		switch {
		case i == 0:
			fmt.Fprintf(b, "M%d %d", at[0], at[1])
		case i == len(p.Points)-1:
			fmt.Fprintf(b, "L%d %d", at[0], at[1])
		default:
			in, out := toward(at, p.Points[i-1]), toward(at, p.Points[i+1])
			fmt.Fprintf(b, "L%d %dQ%d %d %d %d", in[0], in[1], at[0], at[1], out[0], out[1])
		}
	}
	b.WriteString(`"`)
	if p.Stroke > 0 {
		fmt.Fprintf(b, ` stroke-width="%d"`, p.Stroke)
	}
	b.WriteString("/>\n")
}

// toward is the point a corner's radius from one point to another, of which one coordinate is the same.
func toward(from, to [2]int) [2]int {
	for i := range from {
		step := min(max(to[i]-from[i], -corner), corner)
		if d := to[i] - from[i]; step*2 > d && d > 0 || step*2 < d && d < 0 {
			step = d / 2
		}
		from[i] += step
	}
	return from
}

var fontClass = map[font]string{bold: " b", mono: " m"}

func (b *writer) text(t Text) {
	if t.String == "" {
		return
	}
	fmt.Fprintf(b, `<text class="%s%s" x="%d" y="%d" font-size="%d"`, t.Class, fontClass[t.Font], t.X, t.Y, t.Size)
	if anchor := [...]string{Middle: "middle", End: "end"}[t.Anchor]; anchor != "" {
		fmt.Fprintf(b, ` text-anchor="%s"`, anchor)
	}
	fmt.Fprintf(b, ">%s</text>\n", escape(t.String))
}
