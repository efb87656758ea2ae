package topology

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// pods are the pods that hold devices of the node, and their signs in the picture.
type pods struct {
	known bool
	list  []pod
	of    map[string][]mark // by UUID
}

// pod is a pod with what its containers hold.
type pod struct {
	name       string // namespace/name
	sign       string // "A"
	containers []held
}

// held is what a container holds, in words.
type held struct{ container, devices string }

// mark says that a pod holds a device, and how many replicas of it.
type mark struct {
	pod int // in the list
	n   int
}

// podsOf sorts out who holds which of the node's devices. The pods come in the order of their first devices.
func podsOf(n Node) pods {
	ps := pods{known: n.HoldersUnknown == "", of: map[string][]mark{}}
	names := deviceNames(n)
	byPod := map[[2]string][]claim{}
	for _, h := range n.Holders {
		if devices := devicesOf(h, names); len(devices) > 0 {
			key := [2]string{h.Namespace, h.Pod}
			byPod[key] = append(byPod[key], claim{h, devices})
		}
	}
	claims := slices.Collect(maps.Values(byPod))
	for _, list := range claims {
		slices.SortStableFunc(list, compareClaims)
	}
	slices.SortStableFunc(claims, func(a, b []claim) int { return compareClaims(a[0], b[0]) })
	for i, list := range claims {
		ps.list = append(ps.list, pod{name: clean(list[0].Namespace + "/" + list[0].Pod), sign: sign(i)})
		for _, c := range list {
			ps.add(c)
		}
	}
	return ps
}

// claim is a container with those of its devices that the node has.
type claim struct {
	Holder
	devices []share
}

// share is a device, and how many replicas of it.
type share struct {
	uuid string
	name deviceName
	n    int
}

func compareClaims(a, b claim) int {
	return cmp.Or(
		compareNames(a.devices[0].name, b.devices[0].name), cmp.Compare(a.Namespace, b.Namespace),
		cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container),
	)
}

func compareNames(a, b deviceName) int {
	return cmp.Or(cmp.Compare(a.gpu, b.gpu), cmp.Compare(a.mig, b.mig))
}

// add gives the last pod a container.
func (ps *pods) add(c claim) {
	at := len(ps.list) - 1
	var words []string
	for _, d := range c.devices {
		word := d.name.String()
		if d.n > 1 {
			word += fmt.Sprintf(" (%d times)", d.n)
		}
		words = append(words, word)
		marks := ps.of[d.uuid]
		if n := len(marks); n > 0 && marks[n-1].pod == at {
			marks[n-1].n += d.n
		} else {
			ps.of[d.uuid] = append(marks, mark{at, d.n})
		}
	}
	ps.list[at].containers = append(ps.list[at].containers, held{clean(c.Container), strings.Join(words, ", ")})
}

// deviceName is what people call a device.
type deviceName struct{ gpu, mig int }

func (n deviceName) String() string {
	if n.mig < 0 {
		return "GPU " + strconv.Itoa(n.gpu)
	}
	return fmt.Sprintf("MIG %d:%d", n.gpu, n.mig)
}

func deviceNames(n Node) map[string]deviceName {
	names := map[string]deviceName{}
	for i := range n.Snapshot.Devices {
		d := &n.Snapshot.Devices[i]
		if d.UUID != "" {
			names[d.UUID] = deviceName{d.Index, -1}
		}
		for _, m := range d.MIG {
			if m.UUID != "" {
				names[m.UUID] = deviceName{d.Index, m.Index}
			}
		}
	}
	return names
}

// devicesOf are a holder's devices in order: of one that is shared it may hold several replicas.
func devicesOf(h Holder, names map[string]deviceName) []share {
	var list []share
	for _, id := range h.Devices {
		uuid := uuidOf(id)
		name, ok := names[uuid]
		if !ok {
			continue
		}
		if i := slices.IndexFunc(list, func(s share) bool { return s.uuid == uuid }); i >= 0 {
			list[i].n++
		} else {
			list = append(list, share{uuid, name, 1})
		}
	}
	slices.SortStableFunc(list, func(a, b share) int { return compareNames(a.name, b.name) })
	return list
}

// sign is the letter of the n-th pod: A to Z, then AA, AB and so on.
func sign(n int) string {
	if n < 26 {
		return string(rune('A' + n))
	}
	return sign(n/26-1) + sign(n%26)
}

func (ps *pods) marks(uuid string) []mark { return ps.of[uuid] }

// heldBy says who holds a device, for its description.
func (ps *pods) heldBy(uuid string) string {
	var names []string
	for _, m := range ps.of[uuid] {
		names = append(names, ps.list[m.pod].name)
	}
	if len(names) == 0 {
		return ""
	}
	return ", held by " + strings.Join(names, ", ")
}

// badge is a pod's sign at a place.
func badge(sign string, number, x, y int) (Shape, int) {
	w := max(width(sign, 10, bold)+8, 16)
	return Group{Shapes: []Shape{
		Rect{Class: "badge pod" + strconv.Itoa(number%8), X: x, Y: y, W: w, H: 14, CornerRadius: 7},
		Text{Class: "on-badge", X: x + w/2, Y: y + 11, Size: 10, Font: bold, Anchor: Middle, String: sign},
	}}, w
}

// drawMarks draws the signs of the pods that hold a device, as many as there is room for, and how many more there are.
// Of a single one it says the pod's name too, if that is asked for.
func (l *layout) drawMarks(marks []mark, x, y, room int, named bool) []Shape {
	var shapes []Shape
	end := x + room
	for i, m := range marks {
		p := l.pods.list[m.pod]
		s := p.sign
		if m.n > 1 {
			s += "×" + strconv.Itoa(m.n)
		}
		b, w := badge(s, m.pod, x, y)
		more := ""
		if i+1 < len(marks) {
			more = "+" + strconv.Itoa(len(marks)-i-1)
		}
		if i > 0 && x+w+2+width(more, 9, plain) > end {
			return append(shapes, Text{Class: "faint", X: x, Y: y + 11, Size: 9, String: "+" + strconv.Itoa(len(marks)-i)})
		}
		shapes = append(shapes, b)
		x += w + 2
	}
	if named && len(marks) == 1 {
		_, name, _ := strings.Cut(l.pods.list[marks[0].pod].name, "/")
		shapes = append(shapes, Text{Class: "plain", X: x + 2, Y: y + 11, Size: 10, String: fit(name, end-x-2, 10, plain)})
	}
	return shapes
}

// marksWidth is how much room signs took that begin at 0.
func marksWidth(shapes []Shape) int {
	most := 0
	for _, s := range shapes {
		switch s := s.(type) {
		case Group:
			most = max(most, marksWidth(s.Shapes))
		case Rect:
			most = max(most, s.X+s.W)
		case Text:
			_, _, x1, _ := s.bounds()
			most = max(most, x1)
		case Path:
		}
	}
	return most
}
