package topology

// Picture is a drawing as a value: what is where, in pixels from the upper left corner.
type Picture struct {
	Width, Height int
	// Title and Description say in words what the picture shows, for those who cannot see it.
	Title, Description string
	// Shapes are drawn in order: later ones cover earlier ones.
	Shapes []Shape
}

// Shape is one of Group, Rect, Path and Text.
type Shape interface{ shape() }

// Group is shapes that together are one thing of the node.
type Group struct {
	// Class is the kind of thing: "gpu", "bar", "numa", "nvlink", "nvswitch", "holder".
	Class string
	// Data are attributes for programs, written as data-KEY, in order.
	Data [][2]string
	// Title says in words what it is.
	Title  string
	Shapes []Shape
}

// Rect is a rectangle with rounded corners.
type Rect struct {
	Class                    string
	X, Y, W, H, CornerRadius int
}

// Path is a line through points, with its corners rounded.
type Path struct {
	Class string
	// Points are x and y of each point.
	Points [][2]int
	// Stroke is the line's width, or 0 for that of its class.
	Stroke int
}

// Text is one line of text.
type Text struct {
	Class string
	X, Y  int // of the baseline
	// Size is the font's in pixels.
	Size   int
	Font   font
	Anchor Anchor
	String string
}

// Anchor tells which point of a text X is.
type Anchor int

// The anchors.
const (
	Start Anchor = iota
	Middle
	End
)

func (Group) shape() {}
func (Rect) shape()  {}
func (Path) shape()  {}
func (Text) shape()  {}

// bounds are the corners of a text's box, as far as its width can be known without its font.
func (t Text) bounds() (x0, y0, x1, y1 int) {
	w := width(t.String, t.Size, t.Font)
	x := t.X
	switch t.Anchor {
	case Middle:
		x -= w / 2
	case End:
		x -= w
	case Start:
	}
	return x, t.Y - t.Size, x + w, t.Y + t.Size/3
}
