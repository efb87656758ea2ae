package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
)

// A stream creates a pod every streamInterval, unless streamPods of it have not ended yet.
const (
	streamInterval = 200 * time.Millisecond
	streamPods     = 3
)

// Outcome is what became of the pods of a stream.
type Outcome struct {
	Succeeded int
	// Failed has the number of pods that failed, by reason.
	Failed map[string]int
	// Longest is the longest time from the creation of a pod to its end.
	Longest time.Duration
}

// String returns the outcome as a line.
func (o Outcome) String() string {
	line := []string{fmt.Sprintf("%d succeeded", o.Succeeded)}
	for _, reason := range slices.Sorted(maps.Keys(o.Failed)) {
		line = append(line, fmt.Sprintf("%d failed with %s", o.Failed[reason], reason))
	}
	return strings.Join(line, ", ") + fmt.Sprintf(", the slowest after %.1f s", o.Longest.Seconds())
}

// Failures is how many pods failed.
func (o Outcome) Failures() (n int) {
	for _, count := range o.Failed {
		n += count
	}
	return n
}

// Stream creates short pods on a node, each with a GPU, until it is stopped.
type Stream struct {
	stop      context.CancelFunc
	done      chan struct{}
	succeeded atomic.Int64
	failed    map[string]int
	longest   time.Duration // from the creation of a pod to its end, as seen by the stream
	created   map[string]time.Time
	err       error
}

// startStream starts a stream of pods like this one.
func (c *Cluster) startStream(ctx context.Context, p Pod) *Stream {
	running, stop := context.WithCancel(ctx)
	s := &Stream{stop: stop, done: make(chan struct{}), failed: map[string]int{}, created: map[string]time.Time{}}
	p.Command, p.Labels = []string{"true"}, map[string]string{"stream": p.Node}
	go func() {
		defer close(s.done)
		s.err = s.run(ctx, running, c, p)
	}()
	return s
}

// Stop ends the stream and waits until all of its pods have ended.
func (s *Stream) Stop() (Outcome, error) {
	s.stop()
	<-s.done
	return Outcome{int(s.succeeded.Load()), s.failed, s.longest}, s.err
}

// awaitSuccess waits until one more pod has succeeded.
func (s *Stream) awaitSuccess(ctx context.Context) error {
	before := s.succeeded.Load()
	return kubenode.Wait(ctx, patience, "a new pod succeeds", func() error {
		if s.succeeded.Load() == before {
			return errors.New("none has")
		}
		return nil
	})
}

// run creates pods until running ends, and counts those that have ended.
func (s *Stream) run(ctx, running context.Context, c *Cluster, p Pod) error {
	label := "stream=" + p.Node
	ticker := time.NewTicker(streamInterval)
	defer ticker.Stop()
	for i := 0; running.Err() == nil; i++ {
		left, err := s.count(ctx, c, label)
		if err == nil && left < streamPods {
			p.Name = fmt.Sprintf("stream-%s-%d", p.Node, i)
			s.created[p.Name] = time.Now()
			err = c.create(ctx, p)
		}
		if err != nil {
			return err
		}
		select {
		case <-running.Done():
		case <-ticker.C:
		}
	}
	return kubenode.Wait(ctx, patience, "the pods of the stream on "+p.Node+" have ended", func() error {
		left, err := s.count(ctx, c, label)
		if err == nil && left > 0 {
			err = fmt.Errorf("%d have not", left)
		}
		return err
	})
}

// count counts the pods that have ended and removes them. It returns how many have not.
func (s *Stream) count(ctx context.Context, c *Cluster, label string) (left int, err error) {
	pods, err := c.pods(ctx, label)
	if err != nil {
		return 0, err
	}
	for _, p := range pods {
		switch {
		case p.Metadata.DeletionTimestamp != "": // it is counted
			continue
		case p.Status.Phase == "Succeeded":
			s.succeeded.Add(1)
		case p.Status.Phase == "Failed":
			s.failed[p.Status.Reason]++
		default:
			left++
			continue
		}
		s.longest = max(s.longest, time.Since(s.created[p.Metadata.Name]))
		if err := c.remove(ctx, p.Metadata.Name); err != nil {
			return 0, err
		}
	}
	return left, nil
}
