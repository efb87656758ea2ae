package agent

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/dra"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/wording"
)

const (
	// leaveInterval is the time between two checks of who holds devices. A service ends when leaveChecks in a row have
	// found nobody: a kubelet that has just started does not list all of its containers.
	leaveInterval = 5 * time.Second
	leaveChecks   = 3
	// maxHolders is how many holders, and devices of each, are named.
	maxHolders, maxHeld = 10, 2
)

// leaver ends a service that offers no devices, as config.Leave says. It is an actor.
type leaver struct {
	leave  config.Leave
	ledger holders
	claims preparedClaims // nil without a DRA driver
	end    func()         // ends the service
	log    *slog.Logger

	mu    sync.Mutex
	text  string // why the service does not end yet, or empty
	ended bool
}

// holders is the part of ledger.Ledger that is used.
type holders interface {
	Read(ctx context.Context) ([]podresources.Holder, error)
	Holdings() []ledger.Holding
}

// preparedClaims is the part of dra.Driver that is used.
type preparedClaims interface {
	Claims() []string
	Left() bool
}

var (
	_ holders        = (*ledger.Ledger)(nil)
	_ preparedClaims = (*dra.Driver)(nil)
)

func newLeaver(c *config.Config, held *ledger.Ledger, claims *dra.Driver, end func(), log *slog.Logger) *leaver {
	l := &leaver{leave: c.Leave, ledger: held, end: end, log: log, text: "it has not been read yet who holds devices"}
	if claims != nil {
		l.claims = claims
	}
	return l
}

// run ends the service when its devices are free. It logs who holds them when that changes, and once a minute.
func (l *leaver) run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var logged time.Time
	for free := 0; free < leaveChecks; {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		text := l.waitsFor(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if free++; text != "" {
			free = 0
			if text != l.text || time.Since(logged) >= repeatAfter {
				logged = time.Now()
				l.log.Warn(text)
			}
		}
		l.mu.Lock()
		l.text = text
		l.mu.Unlock()
		timer.Reset(leaveInterval)
	}
	text := "no container and no ResourceClaim has a device any more: this program ends"
	if _, containers := l.held(nil); len(containers) > 0 {
		text = "no ResourceClaim has a device any more: this program ends, although containers have devices: " +
			list(containers)
	}
	l.log.Info(text)
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.end()
	return nil
}

// waitsFor says why the service must not end, or is empty.
func (l *leaver) waitsFor(ctx context.Context) string {
	listed, err := l.ledger.Read(ctx)
	claims, containers := l.held(listed)
	var reasons []string
	if l.leave == config.LeaveUnused {
		claims = append(claims, containers...)
		if err != nil {
			reasons = append(reasons, "it is unknown which containers have devices: "+wording.OneLine(err))
		}
	}
	switch {
	case len(claims) > 0:
		reasons = append(reasons, "these have devices, so end their pods: "+list(claims))
	case l.claims != nil && !l.claims.Left():
		reasons = append(reasons, "a ResourceClaim that was allocated before can still be prepared, for a minute")
	}
	if len(reasons) == 0 {
		return ""
	}
	return "no devices are offered any more, and this program waits: " + strings.Join(reasons, "; ")
}

func list(held []string) string { return wording.ShortenList(held, maxHolders, ", ") }

// held names the claims and the containers of the device plugin that have devices, with their devices. The kubelet also
// lists devices that the node does not have any more, such as MIG devices, or none while there is no driver.
func (l *leaver) held(listed []podresources.Holder) (claims, containers []string) {
	byClaim, byContainer := map[string][]string{}, map[string][]string{}
	pods := map[string]string{}
	if l.claims != nil {
		for _, name := range l.claims.Claims() {
			byClaim[name] = nil // it can have admin access only, or a record that cannot be read
		}
	}
	for _, h := range l.ledger.Holdings() {
		name := h.String()
		if h.State == ledger.Forgotten {
			continue
		}
		if h.Claim == "" {
			byContainer[name] = append(byContainer[name], h.UUID)
			continue
		}
		byClaim[name] = append(byClaim[name], h.UUID)
		if len(h.Containers) > 0 {
			pods[name] = " of pod " + h.Namespace + "/" + h.Containers[0].Pod
		}
	}
	for i := range listed {
		h := &listed[i]
		for _, uuid := range h.UUIDs() {
			ours := strings.HasPrefix(uuid, "GPU-") || strings.HasPrefix(uuid, "MIG-")
			if ours && !slices.Contains(byContainer[h.String()], uuid) {
				byContainer[h.String()] = append(byContainer[h.String()], uuid)
			}
		}
	}
	describe := func(held map[string][]string) []string {
		var texts []string
		for _, name := range slices.Sorted(maps.Keys(held)) {
			text := name + pods[name]
			if len(held[name]) > 0 {
				text += " (" + wording.ShortenList(held[name], maxHeld, ", ") + ")"
			}
			texts = append(texts, text)
		}
		return texts
	}
	return describe(byClaim), describe(byContainer)
}

// ready says why the service does not end yet. It is never ready, since it offers nothing.
func (l *leaver) ready() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.text != "" {
		return errors.New(l.text)
	}
	return errors.New("no devices are offered, and this program is about to end")
}

// result returns an error if the service was stopped before its devices were free, or if a claim was prepared in the
// moment in which it ended: otherwise the node may be cleaned up.
func (l *leaver) result() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended {
		return errors.New("this program was stopped while it still waited for the end of pods that have devices")
	}
	if l.claims == nil {
		return nil
	}
	if claims := l.claims.Claims(); len(claims) > 0 {
		return errors.New("this program must be started again, since claims were prepared when it was about to end: " +
			list(claims))
	}
	return nil
}
