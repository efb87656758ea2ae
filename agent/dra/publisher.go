package dra

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/agent/apiserver"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
)

const (
	// firstPause is the pause after the first failure, and longestPause that after many failures. The real pause is up
	// to half shorter or longer, at random: otherwise all nodes that lost the API server at the same time would call it
	// again at the same time.
	firstPause, longestPause = time.Second, 20 * time.Second
	// watchLimit is how long a watch lasts. After it, all slices are compared again.
	watchLimit = 5 * time.Minute
	// maxRounds is how often slices are written for one state before the next pause, if other programs change them.
	maxRounds = 3
	// maxMessage bounds the text of an error, in bytes.
	maxMessage = 1024
)

// api is the part of apiserver.Client that is used.
type api interface {
	Get(ctx context.Context, path string, into any) error
	Send(ctx context.Context, method, path, contentType string, object any) error
	AwaitChange(ctx context.Context, path string, limit time.Duration) error
}

var _ api = (*apiserver.Client)(nil)

// errChanged means that other programs change the slices each time they are written.
var errChanged = errors.New("another program changes the slices; does another DRA driver with this name run on the " +
	"node?")

// errDropped means that the API server drops what it does not know of devices.
var errDropped = errors.New("the API server does not keep the taints of devices, or that several claims can share " +
	"one: it needs Kubernetes 1.36, or the feature gates DRADeviceTaints and DRAConsumableCapacity")

// Publisher keeps the API server's ResourceSlices of the node and driver equal to those of the last Publish. It writes
// only differences. The kubelet deletes all slices of a node when it starts, and those of a driver some 30 s after its
// socket is gone, so the Publisher watches its slices. It is an actor: call Run once.
type Publisher struct {
	api     api
	id      Identity
	log     *slog.Logger
	wake    wake.Chan
	changed func()      // is called when Reason has another result
	written func(error) // is called after a request that writes, with its result

	mu        sync.Mutex
	known     bool // whether Publish was called
	desired   []Slice
	displaced []string // see Offer
	reason    string   // why the slices are not the desired ones, or empty
}

// NewPublisher returns a Publisher.
func NewPublisher(api api, id Identity, log *slog.Logger) *Publisher {
	return &Publisher{
		api: api, id: id, log: log, wake: wake.New(), changed: func() {}, written: func(error) {}, reason: notYet,
	}
}

// notYet is the reason before the API server has answered.
const notYet = "the API server has not answered yet"

// Publish replaces the slices that the API server shall have, and returns at once. Without any, all are deleted.
// Before the first call, those of an earlier process stay. While the Node has allocatable devices of the displaced
// resources, no slices are created.
func (p *Publisher) Publish(list []Slice, displaced []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.displaced = displaced
	unchanged := slices.EqualFunc(p.desired, list, func(a, b Slice) bool { return same(a.Spec, b.Spec) })
	if p.known && unchanged {
		return
	}
	p.known, p.desired = true, list
	p.wake.Wake()
}

// Reason says why the API server does not have the slices yet, or is empty.
func (p *Publisher) Reason() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reason
}

// withdrawn reports whether the API server has no slices any more, as the last Publish said.
func (p *Publisher) withdrawn() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known && len(p.desired) == 0 && p.reason == ""
}

func (p *Publisher) setReason(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.reason
	if p.reason = ""; err != nil {
		p.reason = wording.Shorten(wording.OneLine(err), maxMessage)
	}
	if p.reason != before {
		p.changed()
	}
	switch p.reason {
	case before:
	case "":
		p.log.Info("the ResourceSlices of the node are published")
	default:
		p.log.Warn("the ResourceSlices of the node are not published; retrying: " + p.reason)
	}
}

// Run publishes until ctx ends. The slices stay, so that the scheduler goes on with them while the program restarts.
func (p *Publisher) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-p.wake:
	}
	for pause := firstPause; ctx.Err() == nil; {
		err := p.publish(ctx)
		if err == nil || ctx.Err() != nil {
			pause = firstPause
			continue
		}
		p.setReason(err)
		if errors.Is(err, errDisplaced) { // the kubelet is about to change it
			pause = firstPause
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = min(2*pause, longestPause)
	}
	return nil
}

// publish makes the slices equal to the desired ones, and returns once there may be a difference again.
func (p *Publisher) publish(ctx context.Context) error {
	for round := range maxRounds {
		version, changed, err := p.reconcile(ctx, round > 0)
		if err != nil {
			return err
		}
		if !changed {
			if p.Reason() == notYet { // any other reason, such as a watch that fails, may come back at once
				p.setReason(nil)
			}
			return p.awaitChange(ctx, version)
		}
	}
	return errChanged
}

// awaitChange returns when the slices may not be the desired ones any more, but no sooner than after firstPause unless
// the desired ones have changed: an API server may end each watch at once.
func (p *Publisher) awaitChange(ctx context.Context, version string) error {
	watching, cancel := context.WithCancel(ctx)
	watched := make(chan error, 1)
	var running sync.WaitGroup
	running.Go(func() { watched <- p.api.AwaitChange(watching, p.query(version), watchLimit) })
	defer running.Wait()
	defer cancel()
	steady, ended := time.After(firstPause), false
	for steady != nil || !ended {
		select {
		case err := <-watched:
			// After Gone the API server does not know the version any more.
			if err != nil && !apiserver.Answered(err, http.StatusGone) {
				return fmt.Errorf("watch the ResourceSlices of node %s: %w", p.id.Node, err)
			}
			p.setReason(nil)
			ended = true
		case <-steady:
			p.setReason(nil)
			steady = nil
		case <-p.wake:
			return nil
		}
	}
	return nil
}

const slicesPath = apiPath + "/resourceslices"

// query returns the path of a list of all slices of the node and driver, or of a watch since a version.
func (p *Publisher) query(version string) string {
	q := url.Values{"fieldSelector": {"spec.driver=" + p.id.Driver + ",spec.nodeName=" + p.id.Node}}
	if version != "" {
		q.Set("watch", "1")
		q.Set("resourceVersion", version)
		q.Set("timeoutSeconds", fmt.Sprint(int(watchLimit.Seconds())))
	}
	return slicesPath + "?" + q.Encode()
}

// reconcile compares the slices and writes the differences, perhaps again. It returns the version of the list, and
// whether anything was written.
func (p *Publisher) reconcile(ctx context.Context, again bool) (version string, changed bool, err error) {
	p.mu.Lock()
	desired, displaced := p.desired, p.displaced
	p.mu.Unlock()
	var existing struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Items bounded[Slice] `json:"items"`
	}
	if err := p.api.Get(ctx, p.query(""), &existing); err != nil {
		if apiserver.Answered(err, http.StatusNotFound) {
			err = fmt.Errorf("the API server does not serve %s, which Kubernetes has since 1.34: %w", apiVersion, err)
		}
		return "", false, fmt.Errorf("list the ResourceSlices of node %s: %w", p.id.Node, err)
	}
	plan := planWrites(desired, existing.Items)
	if len(plan) == 0 {
		return existing.Metadata.ResourceVersion, false, nil
	}
	if again && dropsParts(desired, existing.Items) {
		return "", false, errDropped
	}
	var n nodeObject
	if err := p.api.Get(ctx, "/api/v1/nodes/"+url.PathEscape(p.id.Node), &n); err != nil {
		return "", false, fmt.Errorf("read the Node %s, which owns its ResourceSlices: %w", p.id.Node, err)
	}
	for _, w := range plan {
		if w.method == http.MethodPost {
			if err := n.checkDisplaced(displaced); err != nil {
				return "", false, err
			}
		}
		if err := p.write(ctx, w, n.owner(p.id.Node)); err != nil {
			return "", false, err
		}
	}
	return "", true, nil
}

// dropsParts reports whether a device has lost its taints, or that several claims can have it.
func dropsParts(desired, existing []Slice) bool {
	stored := map[string]Device{}
	for _, s := range existing {
		for _, d := range s.Spec.Devices {
			stored[d.Name] = d
		}
	}
	return slices.ContainsFunc(desired, func(s Slice) bool {
		return slices.ContainsFunc(s.Spec.Devices, func(d Device) bool {
			old, is := stored[d.Name]
			return is && (d.Shared && !old.Shared || len(d.Taints) > 0 && len(old.Taints) == 0)
		})
	})
}

// nodeObject is a Node.
type nodeObject struct {
	Metadata Metadata `json:"metadata"`
	Status   struct {
		Allocatable map[string]string `json:"allocatable"`
	} `json:"status"`
}

// owner returns the Node as the owner of slices: the API server deletes them when the Node is deleted.
func (n *nodeObject) owner(name string) Owner {
	return Owner{APIVersion: "v1", Kind: "Node", Name: name, UID: n.Metadata.UID, Controller: true}
}

// errDisplaced means that the Node still has devices of a device plugin.
var errDisplaced = errors.New("slices are created once the kubelet has told the API server that there are none")

// checkDisplaced returns errDisplaced if the Node has allocatable devices of one of these resources.
func (n *nodeObject) checkDisplaced(resources []string) error {
	for _, name := range resources {
		if count := n.Status.Allocatable[name]; count != "" && count != "0" {
			return fmt.Errorf("the Node still has %s allocatable %s of a device plugin: %w", count, name, errDisplaced)
		}
	}
	return nil
}

func (p *Publisher) write(ctx context.Context, w write, owner Owner) error {
	path := slicesPath + "/" + url.PathEscape(w.slice.Metadata.Name)
	w.slice.Metadata.Owners = []Owner{owner}
	var err error
	switch w.method {
	case http.MethodDelete:
		if err = p.api.Send(ctx, w.method, path, "", nil); apiserver.Answered(err, http.StatusNotFound) {
			err = nil // it is gone already
		}
	case http.MethodPost:
		err = p.api.Send(ctx, w.method, slicesPath, apiserver.JSON, w.slice)
	default:
		err = p.api.Send(ctx, w.method, path, apiserver.JSON, w.slice)
	}
	p.written(err)
	if err != nil {
		return fmt.Errorf("%s the ResourceSlice %s: %w", strings.ToLower(w.method), w.slice.Metadata.Name, err)
	}
	return nil
}

// write is a request that changes a slice.
type write struct {
	method string
	slice  Slice
}

// planWrites returns the requests that make the existing slices of a pool equal to the desired ones.
//
// Consumers use a pool only if all of its slices have the same generation. One request cannot leave the pool in
// between, so it keeps the generation. If more are needed, all slices get the next one.
func planWrites(desired, existing []Slice) []write {
	unused := map[string]Slice{}
	var generation int64
	for _, s := range existing {
		unused[s.Metadata.Name] = s
		generation = max(generation, s.Spec.Pool.Generation)
	}
	with := func(s Slice, generation int64) Slice {
		s.Spec.Pool.Generation = generation
		return s
	}
	var changed, created int
	for _, s := range desired {
		old, exists := unused[s.Metadata.Name]
		switch {
		case !exists:
			created++
		case !same(old.Spec, with(s, generation).Spec):
			changed++
		}
	}
	next := generation
	if created > 0 || changed > 1 {
		next++
	}
	var updates, creations []write
	for _, s := range desired {
		s = with(s, next)
		old, exists := unused[s.Metadata.Name]
		delete(unused, s.Metadata.Name)
		s.Metadata.ResourceVersion = old.Metadata.ResourceVersion
		switch {
		case !exists:
			creations = append(creations, write{http.MethodPost, s})
		case !same(old.Spec, s.Spec):
			updates = append(updates, write{http.MethodPut, s})
		}
	}
	var plan []write
	for _, name := range slices.Sorted(maps.Keys(unused)) { // first, since these devices may not exist any more
		plan = append(plan, write{http.MethodDelete, unused[name]})
	}
	return slices.Concat(plan, updates, creations)
}

// same reports whether two slices are the same in the API. The times of taints are ignored: the API server adds them.
func same(a, b SliceSpec) bool {
	one, err := json.Marshal(withoutTimes(a))
	other, otherErr := json.Marshal(withoutTimes(b))
	return err == nil && otherErr == nil && bytes.Equal(one, other)
}

func withoutTimes(s SliceSpec) SliceSpec {
	s.Devices = slices.Clone(s.Devices)
	for i := range s.Devices {
		d := &s.Devices[i]
		d.Taints = slices.Clone(d.Taints)
		for j := range d.Taints {
			d.Taints[j].TimeAdded = nil
		}
	}
	return s
}
