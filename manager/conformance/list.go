package conformance

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/wording"
)

const (
	// kubeletLimit is the size of the largest message that a kubelet receives, in bytes.
	kubeletLimit = 4 << 20
	// maxID is the length of the longest ID that the API's definition allows.
	maxID = 63
	// idMarks are the characters that IDs may have besides letters and digits. Other characters cause trouble in
	// environment variables, file names and labels.
	idMarks = "-_.:/@+="
)

func listsFirst(ctx context.Context, _ *session, p *plugin) verdict {
	if err := p.watch.awaitFirst(ctx, p.timeout); err != nil {
		return failed("the first list: %v", err)
	}
	healthy, unhealthy := len(p.healthy()), len(p.withHealth(false))
	return passed("%d healthy and %d unhealthy devices", healthy, unhealthy)
}

// listed returns a check of the newest list.
func listed(f func([]*v1beta1.Device) verdict) check {
	return each(func(_ context.Context, _ *session, p *plugin) verdict {
		devices := p.devices()
		if len(devices) == 0 {
			return skipped("the plugin has no device")
		}
		return f(devices)
	})
}

// passedUnless returns a failure that names at most three of the breaches, or a pass with the text if there are none.
func passedUnless(broken []string, format string, args ...any) verdict {
	if len(broken) == 0 {
		return passed(format, args...)
	}
	return failed("%s", firstOf(broken))
}

// firstOf joins the first three texts of a list, shortens each, and says how many more there are.
func firstOf(list []string) string {
	var short []string
	for _, text := range list {
		short = append(short, wording.Shorten(text, maxQuoted))
	}
	return wording.ShortenList(short, 3, ", ")
}

func listSize(_ context.Context, _ *session, p *plugin) verdict {
	largest := 0
	for _, l := range p.allLists() {
		largest = max(largest, proto.Size(l))
	}
	switch {
	case largest == 0 && len(p.allLists()) == 0:
		return skipped("there is no list")
	case largest > kubeletLimit:
		return failed("a list of %d bytes, and the limit is %d", largest, kubeletLimit)
	}
	return passed("%d bytes", largest)
}

// allLists returns the lists of all streams that were kept open, as a kubelet does.
func (p *plugin) allLists() []*v1beta1.ListAndWatchResponse {
	var all []*v1beta1.ListAndWatchResponse
	for _, w := range append(slices.Clone(p.earlier), p.watch) {
		lists, _, _ := w.state()
		all = append(all, lists...)
	}
	return all
}

func idLength(devices []*v1beta1.Device) verdict {
	var broken []string
	for _, id := range ids(devices) {
		if len(id) == 0 || len(id) > maxID {
			broken = append(broken, fmt.Sprintf("%q has %d bytes", id, len(id)))
		}
	}
	return passedUnless(broken, "%d IDs, such as %q", len(devices), devices[0].GetID())
}

func idCharacters(devices []*v1beta1.Device) verdict {
	foreign := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune(idMarks, r)
	}
	var broken []string
	for _, id := range ids(devices) {
		if strings.ContainsFunc(id, foreign) {
			broken = append(broken, fmt.Sprintf("%q", id))
		}
	}
	return passedUnless(broken, "%d IDs, such as %q", len(devices), devices[0].GetID())
}

func idsUnique(devices []*v1beta1.Device) verdict {
	all := ids(devices)
	var broken []string
	for i, id := range all {
		if i > 0 && all[i-1] == id {
			broken = append(broken, fmt.Sprintf("%q is listed twice", id))
		}
	}
	return passedUnless(slices.Compact(broken), "%d IDs", len(all))
}

func healthWords(devices []*v1beta1.Device) verdict {
	var broken []string
	for _, d := range devices {
		if h := d.GetHealth(); h != v1beta1.Healthy && h != v1beta1.Unhealthy {
			broken = append(broken, fmt.Sprintf("%q is %q", d.GetID(), h))
		}
	}
	return passedUnless(broken, "%d devices", len(devices))
}

func topologyForm(devices []*v1beta1.Device) verdict {
	var broken []string
	with := 0
	for _, d := range devices {
		nodes := map[int64]bool{}
		for _, n := range d.GetTopology().GetNodes() {
			if id := n.GetID(); id < 0 || nodes[id] {
				broken = append(
					broken,
					fmt.Sprintf("%q has NUMA node %d, which is negative or listed twice", d.GetID(), id),
				)
			}
			nodes[n.GetID()] = true
		}
		with += min(1, len(nodes))
	}
	return passedUnless(broken, "%d of %d devices have NUMA nodes", with, len(devices))
}

func topologyEmpty(devices []*v1beta1.Device) verdict {
	var broken []string
	for _, d := range devices {
		if d.GetTopology() != nil && len(d.GetTopology().GetNodes()) == 0 {
			broken = append(broken, fmt.Sprintf("%q", d.GetID()))
		}
	}
	return passedUnless(broken, "%d devices", len(devices))
}

// listsReopened closes the stream and opens it again.
func listsReopened(ctx context.Context, s *session, p *plugin) verdict {
	if err := p.watch.awaitFirst(ctx, p.timeout); err != nil {
		return skipped("there was no first list")
	}
	p.watch.close()
	p.earlier = append(p.earlier, p.watch)
	p.watch = p.startWatch(s.watchContext(ctx))
	if err := p.watch.awaitFirst(ctx, p.timeout); err != nil {
		return failed("the list of a stream that was opened again: %v", err)
	}
	return passed("a list came again")
}

// watchContext returns the context of streams that stay open until the kubelet's side stops.
func (s *session) watchContext(ctx context.Context) context.Context {
	if s.kubelet != nil {
		return s.kubelet.ctx
	}
	return ctx
}

// listsTwice opens a second stream while the first is open, like a kubelet while a plugin is replaced.
func listsTwice(ctx context.Context, _ *session, p *plugin) verdict {
	if _, _, ended := p.watch.state(); ended != nil {
		return skipped("the first stream has ended: %s", reason(ended, p.timeout))
	}
	second, err := connect(p.resource, p.socket, p.timeout)
	if err != nil {
		return failed("%v", err)
	}
	defer second.close()
	second.watch = second.startWatch(ctx)
	if err := second.watch.awaitFirst(ctx, p.timeout); err != nil {
		return failed("the list of a second stream: %v", err)
	}
	if _, _, ended := p.watch.state(); ended != nil {
		return failed("the first stream ended when a second was opened: %s", reason(ended, p.timeout))
	}
	return passed("both streams have lists")
}

// listsStable compares the first lists of streams that were opened one after the other.
func listsStable(_ context.Context, _ *session, p *plugin) verdict {
	now, _, _ := p.watch.state()
	if len(p.earlier) == 0 || len(now) == 0 {
		return skipped("there are no two streams to compare")
	}
	before, _, _ := p.earlier[0].state()
	if len(before) == 0 {
		return skipped("there are no two streams to compare")
	}
	if diff := difference(before[0].GetDevices(), now[0].GetDevices()); diff != "" {
		return failed("when the stream was opened again, %s", diff)
	}
	return passed("the same %d devices", len(now[0].GetDevices()))
}

// difference says how the device IDs of two lists differ.
func difference(before, after []*v1beta1.Device) string {
	old, current := slices.Compact(ids(before)), slices.Compact(ids(after))
	var parts []string
	for _, id := range old {
		if _, found := slices.BinarySearch(current, id); !found {
			parts = append(parts, fmt.Sprintf("%q was missing", id))
		}
	}
	for _, id := range current {
		if _, found := slices.BinarySearch(old, id); !found {
			parts = append(parts, fmt.Sprintf("%q was new", id))
		}
	}
	return firstOf(parts)
}

// healthFlips makes a device change its health and waits for the list that shows the change.
func healthFlips(ctx context.Context, s *session) verdict {
	if len(s.opts.Flip) == 0 {
		return skipped("no command that changes a device's health was given (--flip)")
	}
	if len(s.plugins) == 0 {
		return skipped("the plugin has not registered")
	}
	healthy := map[*plugin][]string{}
	for _, p := range s.plugins {
		healthy[p] = p.healthy()
	}
	if err := runCommand(ctx, s.opts.Flip, s.opts.Output); err != nil {
		return failed("the command that changes a device's health: %v", err)
	}
	v := each(func(ctx context.Context, _ *session, p *plugin) verdict {
		changed := func(*v1beta1.ListAndWatchResponse) bool { return !slices.Equal(healthy[p], p.healthy()) }
		if err := p.watch.await(ctx, p.timeout, changed); err != nil {
			if len(s.plugins) > 1 {
				return skipped("no change")
			}
			return failed("a list with another number of healthy devices: %v", err)
		}
		return passed("%d healthy devices before, %d after", len(healthy[p]), len(p.healthy()))
	})(ctx, s)
	if v.outcome == Skipped {
		return failed("no resource has another number of healthy devices")
	}
	return v
}

// listsFull fails if a later list of a stream has only some of the devices of the stream's first list.
func listsFull(_ context.Context, _ *session, p *plugin) verdict {
	lists := 0
	for _, w := range append(slices.Clone(p.earlier), p.watch) {
		stream, _, _ := w.state()
		for i := 1; i < len(stream); i++ {
			lists++
			first, later := ids(stream[0].GetDevices()), ids(stream[i].GetDevices())
			if len(later) < len(first) && len(later) > 0 && subset(later, first) {
				return failed("a stream began with %d devices, and a later list had %d of them", len(first), len(later))
			}
		}
	}
	if lists == 0 {
		return skipped("no stream sent a second list")
	}
	return passed("%d lists after the first of their streams", lists)
}

// subset reports whether all elements of `part` are in `whole`, which is sorted.
func subset(part, whole []string) bool {
	return !slices.ContainsFunc(part, func(id string) bool {
		_, found := slices.BinarySearch(whole, id)
		return !found
	})
}
