package lease

import (
	"cmp"
	"fmt"
	"maps"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpu-cdi-plugin/internal/wording"
)

// explain tells the waiting requests why they wait. The caller holds s.mu.
func (s *Service) explain(waiting []*waiter, devices []Device) {
	holders := s.holders()
	kept := map[deviceKey]time.Duration{} // for earlier requests
	for _, w := range waiting {
		free, all, refused := 0, 0, ""
		held := map[string]int{} // how many devices each holder has
		for _, d := range w.candidates(devices) {
			switch {
			case d.Broken:
				continue
			case d.tooBusy(&w.Request):
				refused = "; " + d.ID + " is left out: " + d.Busy
			case d.Free:
				free++
			default:
				held[holders[d.key()]]++
			}
			all++
		}
		are := "are"
		if free == 1 || all == 1 {
			are = "is"
		}
		reason := fmt.Sprintf("%d of %s that would do %s free", free, wording.Count(all, "device"), are) +
			shares(held) + refused
		within := w.within(devices, kept)
		keep(kept, w.candidates(devices), within)
		if within > 0 {
			reason += "; enough will be by " + clockTime(time.Now(), within)
		}
		switch err := w.possible(devices); {
		case len(devices) == 0:
			reason = "no device plugin has listed devices yet"
		case err != nil: // not all plugins are connected
			reason = wording.OneLine(err) + " so far"
		}
		w.reason = reason
		w.changed.Wake()
	}
}

// clockTime says when a time from now is, as people read a clock. A time that is left would be wrong soon.
func clockTime(now time.Time, left time.Duration) string {
	at := now.Add(left + time.Minute - 1).Truncate(time.Minute)
	if at.YearDay() != now.YearDay() || at.Year() != now.Year() {
		return at.Format("2006-01-02 15:04")
	}
	return at.Format("15:04")
}

// maxHolders is how many holders of devices a reason names.
const maxHolders = 4

// shares says how many devices each holder has, like ": user alice has 3, user bob has 1".
func shares(held map[string]int) string {
	var list []string
	for _, holder := range slices.Sorted(maps.Keys(held)) {
		list = append(list, fmt.Sprintf("%s has %d", holder, held[holder]))
	}
	if len(list) == 0 {
		return ""
	}
	return ": " + wording.ShortenList(list, maxHolders, ", ")
}

// holders returns who has devices: the user of a lease, or a pod.
func (s *Service) holders() map[deviceKey]string {
	names := map[int]string{}
	holders := map[deviceKey]string{}
	for _, p := range s.o.Manager.Pods() {
		holder := "pod " + p.Pod.Namespace + "/" + p.Pod.Name
		if p.Lease != nil {
			if names[p.Caller.UID] == "" {
				names[p.Caller.UID] = "user " + UserName(p.Caller.UID)
			}
			holder = names[p.Caller.UID]
		}
		for _, d := range heldBy(p) {
			holders[d] = holder
		}
	}
	return holders
}

// UserName returns the name of a user, or his number.
func UserName(uid int) string {
	u, err := user.LookupId(strconv.Itoa(uid))
	if err != nil {
		return strconv.Itoa(uid)
	}
	return u.Username
}

// Counts are numbers about leases.
type Counts struct {
	Leases, Waiting int
	DeviceSeconds   float64 // of the leases that have ended since the start of the manager
}

// Counts returns the present numbers.
func (s *Service) Counts() Counts {
	s.mu.Lock()
	c := Counts{Waiting: len(s.queue), DeviceSeconds: s.deviceSeconds}
	s.mu.Unlock()
	for _, p := range s.o.Manager.Pods() {
		if p.Lease != nil {
			c.Leases++
		}
	}
	return c
}

// Lease is a lease that has begun.
type Lease struct {
	ID       string    `json:"id"`
	UID      int       `json:"uid"`  // of the user
	User     string    `json:"user"` // his name, or the number
	PID      int       `json:"pid"`
	Command  string    `json:"command"`
	Resource string    `json:"resource"`
	Devices  []string  `json:"devices"`           // their IDs
	Indexes  []string  `json:"indexes,omitempty"` // on the host, sorted like the devices, without those that are not known
	Models   []string  `json:"models,omitempty"`
	Since    time.Time `json:"since"`
	// Ends is when its time is over, by the present clock.
	Ends *time.Time `json:"ends,omitempty"`
}

// List returns the leases and the waiting requests, both in order, the devices that something uses without a lease, and
// those that could not be leased of late.
func (s *Service) List() (leases []Lease, waiting []Waiting, busy []Busy) {
	for _, p := range s.o.Manager.Pods() {
		if p.Lease == nil {
			continue
		}
		l := Lease{
			ID: p.Pod.Name, UID: p.Caller.UID, User: UserName(p.Caller.UID), PID: p.Lease.Process.PID,
			Command: p.Lease.Command, Devices: held(p), Since: p.Admitted,
		}
		for _, a := range p.Allocations {
			l.Resource = a.Resource
		}
		for _, id := range l.Devices {
			info := s.o.Describe(id)
			if info.Model != "" {
				l.Models = append(l.Models, strings.TrimSpace(info.Model+" "+info.Profile))
			}
			if info.Index != "" {
				l.Indexes = append(l.Indexes, info.Index)
			}
		}
		l.Models = slices.Compact(l.Models)
		if p.Lease.Ends > 0 {
			ends := time.Now().Add(p.Lease.Ends - sinceBoot()).Round(time.Second)
			l.Ends = &ends
		}
		leases = append(leases, l)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.queue {
		if w.placed == nil {
			waiting = append(waiting, s.describe(w))
		}
	}
	return leases, waiting, s.busy()
}

// busy returns the devices that something uses without a lease, and those that could not be prepared of late, sorted.
// The caller holds s.mu.
func (s *Service) busy() []Busy {
	maps.DeleteFunc(s.refused, func(_ deviceKey, r refusal) bool { return time.Since(r.at) > shownTime })
	all := map[deviceKey]Busy{}
	for d, r := range s.refused {
		all[d] = Busy{d.resource, d.id, r.why, r.at}
	}
	for _, r := range s.o.Manager.Resources() {
		for _, d := range r.Devices {
			if used := s.usedBy(d); used.Reason != "" {
				all[deviceKey{r.Name, d.ID}] = Busy{r.Name, d.ID, used.Reason, used.Since}
			}
		}
	}
	var list []Busy
	for _, b := range all {
		list = append(list, b)
	}
	slices.SortFunc(list, func(a, b Busy) int {
		return cmp.Or(strings.Compare(a.Device, b.Device), strings.Compare(a.Resource, b.Resource))
	})
	return list
}
