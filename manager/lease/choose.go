package lease

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"time"
	"unicode"

	"gpu-cdi-plugin/internal/wording"
)

// Request is what a lease asks for: all of it or nothing.
type Request struct {
	// Count is how many devices. They are of one resource, and no two of them are replicas of one device.
	Count int `json:"count"`
	// Resource is the resource of the devices. If it is empty, the other fields say which resources will do.
	Resource string `json:"resource,omitempty"`
	// Model is a part of the name of the model, in any case. Profile is that of a MIG device; if it is empty and Resource
	// too, the devices are whole ones.
	Model   string `json:"model,omitempty"`
	Profile string `json:"profile,omitempty"`
	// MinMemory is how much memory each device has at least, in bytes.
	MinMemory uint64 `json:"minMemoryBytes,omitempty"`
	// SameNUMA has all devices near one NUMA node.
	SameNUMA bool `json:"sameNUMA,omitempty"`
	// Devices are the IDs of exactly the devices, without the number of a replica or with it. Those that the process uses
	// already are not prepared, nor are any for root.
	Devices []string `json:"devices,omitempty"`
	// AllowBusy takes devices that something uses without a lease. They are not prepared.
	AllowBusy bool `json:"allowBusy,omitempty"`

	pid     int  // the process that has the lease
	trusted bool // whether root asks
}

// maxCount is more than the devices of any machine.
const maxCount = 4096

// check returns an error that wraps ErrInvalid if the request makes no sense.
func (r *Request) check() error {
	if r.Count < 1 || r.Count > maxCount {
		return fmt.Errorf("%w: a lease has 1 to %d devices, not %d", ErrInvalid, maxCount, r.Count)
	}
	if len(r.Devices) > 0 && len(r.Devices) != r.Count {
		return fmt.Errorf("%w: the count is %d, and the number of names %d", ErrInvalid, r.Count, len(r.Devices))
	}
	for _, text := range slices.Concat([]string{r.Resource, r.Model, r.Profile}, r.Devices) {
		if len(text) > maxText || text != printable(text) { // others see it
			return fmt.Errorf("%w: %.*q is no name of a resource, model, profile or device", ErrInvalid, maxText, text)
		}
	}
	return nil
}

// maxText is the length of the longest name in a request, in bytes.
const maxText = 253

// printable replaces what can change a terminal, or breaks a line.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsPrint(r):
			return r
		case unicode.IsSpace(r):
			return ' '
		}
		return unicode.ReplacementChar
	}, text)
}

// String says what is asked for, like `2 devices of a model "H100"`.
func (r *Request) String() string {
	text := []string{wording.Count(r.Count, "device")}
	for _, part := range []struct{ value, text string }{
		{r.Resource, "of the resource " + r.Resource},
		{r.Model, fmt.Sprintf("of a model %q", r.Model)},
		{r.Profile, "with the profile " + r.Profile},
	} {
		if part.value != "" {
			text = append(text, part.text)
		}
	}
	if r.MinMemory > 0 {
		text = append(text, "with "+gib(r.MinMemory))
	}
	if r.SameNUMA {
		text = append(text, "near one NUMA node")
	}
	if len(r.Devices) > 0 {
		text = append(text, "("+wording.ShortenList(r.Devices, 4, ", ")+")")
	}
	return strings.Join(text, " ")
}

func gib(bytes uint64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30)) }

// Device is a device that a plugin lists.
type Device struct {
	ID       string
	Resource string
	Free     bool // whether a lease can have it now
	// Busy says why only a request whose devices are not prepared can have it now: something uses it without a lease, or
	// it could not be prepared.
	Busy   string
	Users  []int // the PIDs of the processes that use it without a lease, as far as they are known
	Broken bool  // whether no lease can have it until it is repaired: it is unhealthy or withheld
	// Within is in how long the device is free at the latest. It is 0 if that is not known, or the device is free.
	Within time.Duration
	NUMA   []int
	Info   Info
}

// Info is what the plugin says about a device, in a file. All of it is empty if there is no file.
type Info struct {
	UUID        string `json:"uuid"`
	Index       string `json:"index"` // on the host, such as "3", or "3:0" for a MIG device
	Model       string `json:"model"`
	Profile     string `json:"profile"`
	MemoryBytes uint64 `json:"memoryBytes"`
}

// device returns what an ID names without the number of a replica: replicas of a device have IDs like UUID::2.
func (d *Device) device() string {
	name, _, _ := strings.Cut(d.ID, "::")
	return name
}

// deviceKey tells devices apart: two plugins may list devices with one ID.
type deviceKey struct{ resource, id string }

func (d *Device) key() deviceKey { return deviceKey{d.Resource, d.ID} }

// suits reports whether a request can be met by a device, free or not.
func (r *Request) suits(d *Device) bool {
	if len(r.Devices) > 0 {
		return slices.Contains(r.Devices, d.ID) || slices.Contains(r.Devices, d.device())
	}
	whole := r.Resource == "" && r.Profile == ""
	return (r.Resource == "" || r.Resource == d.Resource) &&
		strings.Contains(strings.ToLower(d.Info.Model), strings.ToLower(r.Model)) &&
		(r.Profile == d.Info.Profile || r.Profile == "" && !whole) && d.Info.MemoryBytes >= r.MinMemory
}

// choice is a set of devices of one resource from which a request can be met.
type choice struct {
	resource string
	among    []string
	// unprepared means that the devices are not prepared.
	unprepared bool
	// passes means that an earlier request waits for some of the devices, and cannot have them before this one's time is
	// over.
	passes bool
}

// choose returns from which of the devices a request can be met, in the order of the resources' names, or nil if it
// cannot be met.
func (r *Request) choose(devices []Device) *choice {
	byResource := map[string][]*Device{}
	seen := map[string]bool{}
	for i := range devices {
		d := &devices[i]
		if key := d.Resource + " " + d.device(); r.suits(d) && !seen[key] {
			seen[key] = true
			byResource[d.Resource] = append(byResource[d.Resource], d)
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(byResource)) {
		if list := r.near(byResource[resource]); len(list) >= r.Count {
			c := &choice{resource: resource}
			for _, d := range list {
				c.among = append(c.among, d.ID)
			}
			return c
		}
	}
	return nil
}

// near returns the devices near one NUMA node if the request wants that: near the one with the fewest that are enough,
// so that few nodes are broken up.
func (r *Request) near(list []*Device) []*Device {
	if !r.SameNUMA {
		return list
	}
	byNode := map[int][]*Device{}
	for _, d := range list {
		for _, n := range d.NUMA {
			byNode[n] = append(byNode[n], d)
		}
	}
	var best []*Device
	for _, n := range slices.Sorted(maps.Keys(byNode)) {
		if near := byNode[n]; len(near) >= r.Count && (best == nil || len(near) < len(best)) {
			best = near
		}
	}
	return best
}

// candidates returns the devices by which a request can be met, free or not. Replicas are among them only if they are
// asked for by their resource, or the host has no whole device that suits.
func (r *Request) candidates(devices []Device) []Device {
	suitable := slices.DeleteFunc(slices.Clone(devices), func(d Device) bool { return !r.suits(&d) })
	isReplica := func(d Device) bool { return d.ID != d.device() }
	whole := slices.DeleteFunc(slices.Clone(suitable), isReplica)
	if r.Resource == "" && len(r.Devices) == 0 && len(whole) > 0 {
		return whole
	}
	return suitable
}

// choice returns from which of the devices a request can be met now, or nil. It leaves out those that are kept, and
// those that are busy if the request does not need them.
func (r *Request) choice(devices []Device, kept func(deviceKey) bool) *choice {
	free := slices.DeleteFunc(r.candidates(devices), func(d Device) bool {
		return !d.Free || kept(d.key()) || d.tooBusy(r)
	})
	c := r.choose(slices.DeleteFunc(slices.Clone(free), func(d Device) bool { return d.Busy != "" }))
	if c != nil {
		c.unprepared = r.AllowBusy || r.trusted && len(r.Devices) > 0
		return c
	}
	if c = r.choose(free); c != nil {
		c.unprepared = true
	}
	return c
}

// tooBusy reports whether a request cannot have a device since something else uses it.
func (d *Device) tooBusy(r *Request) bool {
	uses := len(r.Devices) > 0 && (r.trusted || slices.Contains(d.Users, r.pid))
	return d.Busy != "" && !r.AllowBusy && !uses
}

// within returns in how long a request can be met at the latest if it gets each device that becomes free. Some are kept
// for earlier requests, which can be met in the given times. It is 0 if the time is not known, or the request can be
// met now.
func (r *Request) within(devices []Device, kept map[deviceKey]time.Duration) time.Duration {
	candidates := r.candidates(devices)
	times := []time.Duration{0}
	for _, d := range candidates {
		times = append(times, d.Within, kept[d.key()])
	}
	slices.Sort(times)
	times = slices.Compact(times)
	i := sort.Search(len(times), func(i int) bool {
		come := func(t time.Duration) bool { return 0 < t && t <= times[i] }
		return r.choose(slices.DeleteFunc(slices.Clone(candidates), func(d Device) bool {
			earlier, isKept := kept[d.key()]
			return d.Broken || d.tooBusy(r) || !d.Free && !come(d.Within) || isKept && !come(earlier)
		})) != nil
	})
	if i == len(times) {
		return 0
	}
	return times[i]
}

// demand is a request that waits.
type demand struct {
	Request

	// takes is the time after which the command has ended; 0 means that it has no limit.
	takes time.Duration
}

// next returns the first of the waiting requests that can have devices now, and from which it can have them, or nil.
// A request passes an earlier one only with devices that this one cannot use, or cannot have before the later one has
// ended. So whoever waits gets his devices in the end. Who waits for devices that nobody can have holds back nobody:
// that may take days.
func next(waiting []demand, devices []Device) (int, *choice) {
	kept := map[deviceKey]time.Duration{} // devices for which earlier requests wait, and how long these wait for them
	isKept := func(d deviceKey) bool { _, is := kept[d]; return is }
	for i := range waiting {
		r := &waiting[i]
		if c := r.choice(devices, isKept); c != nil {
			return i, c
		}
		if r.takes > 0 {
			if c := r.choice(devices, func(d deviceKey) bool { return isKept(d) && kept[d] < r.takes }); c != nil {
				c.passes = true
				return i, c
			}
		}
		mine := r.candidates(devices)
		unusable := func(d Device) bool { return d.Broken || d.tooBusy(&r.Request) }
		if r.choose(slices.DeleteFunc(slices.Clone(mine), unusable)) == nil {
			continue
		}
		var within time.Duration
		if slices.ContainsFunc(waiting[i+1:], func(later demand) bool { return later.takes > 0 }) {
			within = r.within(devices, kept)
		}
		keep(kept, mine, within)
	}
	return 0, nil
}

// keep keeps devices for a request that can be met in a time, 0 if that is not known. What is kept for two is kept for
// the one that can be met first.
func keep(kept map[deviceKey]time.Duration, devices []Device, within time.Duration) {
	for _, d := range devices {
		if before, is := kept[d.key()]; !is || within < before {
			kept[d.key()] = within
		}
	}
}

var (
	// ErrInvalid means that a request makes no sense.
	ErrInvalid = errors.New("invalid request")
	// ErrImpossible means that the devices of this host do not meet a request, even if all were free.
	ErrImpossible = errors.New("this host cannot give")
)

// possible returns an error that wraps ErrImpossible and says what there is, if a request cannot be met by all devices.
func (r *Request) possible(devices []Device) error {
	if r.choose(r.candidates(devices)) != nil {
		return nil
	}
	hidden := ""
	if r.wantsMIG() && !slices.ContainsFunc(devices, Device.isMIG) {
		hidden = "no MIG devices are listed, which gpu-cdi-plugin does with mig-strategy mixed or single; "
	}
	if len(devices) == 0 {
		return fmt.Errorf("%w %s: %sno device plugin lists devices", ErrImpossible, r, hidden)
	}
	counts := map[string]int{}
	seen := map[string]bool{}
	for i := range devices {
		d := &devices[i]
		if key := d.Resource + " " + d.device(); !seen[key] {
			seen[key] = true
			counts[d.kind()]++
		}
	}
	var list []string
	for _, kind := range slices.Sorted(maps.Keys(counts)) {
		list = append(list, fmt.Sprintf("%d x %s", counts[kind], kind))
	}
	return fmt.Errorf("%w %s: %sit has %s", ErrImpossible, r, hidden, wording.ShortenList(list, 8, ", "))
}

// wantsMIG reports whether only MIG devices of NVIDIA can meet a request.
func (r *Request) wantsMIG() bool {
	return r.Profile != "" || strings.Contains(r.Resource, "/mig-") || slices.ContainsFunc(r.Devices, hasUUIDOfMIG)
}

func (d Device) isMIG() bool { return d.Info.Profile != "" || hasUUIDOfMIG(d.ID) }

func hasUUIDOfMIG(id string) bool { return strings.HasPrefix(id, "MIG-") }

// kind says what a device is, like "nvidia.com/gpu (NVIDIA H100 80GB HBM3, 80.0 GiB)".
func (d *Device) kind() string {
	var what []string
	for _, text := range []string{d.Info.Model, d.Info.Profile} {
		if text != "" {
			what = append(what, text)
		}
	}
	if d.Info.MemoryBytes > 0 {
		what = append(what, gib(d.Info.MemoryBytes))
	}
	if len(what) == 0 {
		return d.Resource
	}
	return d.Resource + " (" + strings.Join(what, ", ") + ")"
}
