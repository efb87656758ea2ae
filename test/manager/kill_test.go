package manager

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/test/lib/testenv"
	"gpu-cdi-plugin/test/manager/behaviour"
)

var kills = flag.Int("kills", 100, "how often the manager is killed")

const killed = "example.com/gpu"

// TestSlowNothingAcknowledgedIsLostWhenTheManagerIsKilled ends the manager by SIGKILL while clients admit and release
// pods, and compares what it knows after its next start with what it has answered.
func TestSlowNothingAcknowledgedIsLostWhenTheManagerIsKilled(t *testing.T) {
	const devices = 32
	p := newProgram(t)
	var list []*v1beta1.Device
	for i := range devices {
		list = append(list, &v1beta1.Device{ID: fmt.Sprintf("d%02d", i), Health: v1beta1.Healthy})
	}
	plugin := behaviour.NewPlugin(killed, filepath.Join(p.plugins, "plugin.sock"), list...)
	t.Cleanup(plugin.Stop)
	c := &checker{program: p, known: map[string]record{}}
	plug := func() {
		plugin.Stop()
		testenv.Must(t, plugin.Serve())
		testenv.Must(t, plugin.Register(t.Context(), p.plugins))
		p.await("the devices are counted", func() bool { return p.allocatable(killed) == devices })
	}
	for round := range *kills {
		p.start()
		c.check()
		plug()
		var clients sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		for i := range 6 {
			clients.Go(func() { c.work(ctx, fmt.Sprintf("%d-%d", round, i)) })
		}
		c.awaitAnswers(rand.IntN(30))
		time.Sleep(time.Duration(rand.Int64N(int64(4 * time.Millisecond))))
		testenv.Must(t, p.process.Kill())
		cancel()
		clients.Wait()
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
	}
	p.start()
	c.check()
	plug()
	for uid := range c.known {
		if err := p.api.Release(t.Context(), uid); err != nil && !errors.Is(err, manager.ErrNotFound) {
			t.Error(err)
		}
	}
	if _, err := p.admit(t.Context(), "all", killed, devices); err != nil {
		t.Errorf("not all devices are free after all pods were released: %v", err)
	}
	t.Logf(
		"killed %d times; %d admissions and %d releases were acknowledged, %d calls had no answer; "+
			"%d times a pod had to be there after a kill",
		*kills,
		c.admitted,
		c.released,
		c.unanswered,
		c.outlived,
	)
	if c.outlived < *kills {
		t.Error("too few pods were held when the manager was killed")
	}
}

// record is what is known of a pod.
type record struct {
	ids []string // as the manager answered; nil if the admission had no answer
	// leaving is whether its release had no answer: the pod may be there or not.
	leaving bool
}

// checker has what the manager has answered.
type checker struct {
	*program

	mu                             sync.Mutex
	known                          map[string]record // by UID; those that are surely released are missing
	admitted, released, unanswered int
	outlived                       int // pods that had to be there after a kill
}

// work admits pods with 1 to 3 devices and releases some, until a call fails. Some always stay: they must outlive the
// kill.
func (c *checker) work(ctx context.Context, name string) {
	for i := 0; ctx.Err() == nil; i++ {
		uid := fmt.Sprintf("%s-%d", name, i)
		c.note(uid, record{})
		pod, err := c.admit(ctx, uid, killed, 1+rand.IntN(3))
		rejected := (*api.Error)(nil)
		switch {
		case errors.As(err, &rejected): // an answer: the devices are used up
			c.forget(uid)
		case err != nil:
			c.count(&c.unanswered)
			return
		default:
			c.note(uid, record{ids: idsOf(pod)})
			c.count(&c.admitted)
		}
		if victim := c.pick(); victim != "" && !c.release(ctx, victim) {
			return
		}
	}
}

// pick takes an acknowledged pod to release, if enough others stay.
func (c *checker) pick() string {
	const stay = 5
	c.mu.Lock()
	defer c.mu.Unlock()
	var held []string
	for uid, r := range c.known {
		if r.ids != nil && !r.leaving {
			held = append(held, uid)
		}
	}
	if len(held) <= stay {
		return ""
	}
	uid := held[rand.IntN(len(held))]
	r := c.known[uid]
	r.leaving = true
	c.known[uid] = r
	return uid
}

func (c *checker) release(ctx context.Context, uid string) bool {
	if err := c.api.Release(ctx, uid); err != nil {
		if answer := (*api.Error)(nil); errors.As(err, &answer) {
			c.Errorf("release %s: %v", uid, err)
		}
		c.count(&c.unanswered)
		return false
	}
	c.forget(uid)
	c.count(&c.released)
	return true
}

// awaitAnswers waits until the clients have some more answers, or had time for them.
func (c *checker) awaitAnswers(more int) {
	answers := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.admitted + c.released
	}
	before := answers()
	for begin := time.Now(); answers() < before+more && time.Since(begin) < time.Second; time.Sleep(time.Millisecond) {
	}
}

func (c *checker) note(uid string, r record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known[uid] = r
}

func (c *checker) forget(uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.known, uid)
}

func (c *checker) count(n *int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	*n++
}

// check compares the pods that the manager knows after a start with what it answered before. What was without an answer
// may have been done or not; from here on that is known.
func (c *checker) check() {
	c.Helper()
	for _, r := range c.known {
		if r.ids != nil && !r.leaving {
			c.outlived++
		}
	}
	pods, err := c.api.Pods(c.Context())
	testenv.Must(c, err)
	holders, there := map[string]string{}, map[string]bool{}
	for _, p := range pods {
		uid, ids := p.Metadata.UID, idsOf(p)
		there[uid] = true
		r, known := c.known[uid]
		switch {
		case !known:
			c.Errorf("pod %s was released, or refused, and has %v", uid, ids)
		case r.ids != nil && !slices.Equal(r.ids, ids):
			c.Errorf("pod %s was given %v and has %v", uid, r.ids, ids)
		case len(ids) == 0:
			c.Errorf("pod %s has no devices", uid)
		}
		for _, id := range ids {
			if other, held := holders[id]; held {
				c.Errorf("device %s has the pods %s and %s", id, other, uid)
			}
			holders[id] = uid
		}
		c.known[uid] = record{ids: ids}
	}
	for uid, r := range c.known {
		if there[uid] {
			continue
		}
		if r.ids != nil && !r.leaving {
			c.Errorf("pod %s was given %v and is forgotten", uid, r.ids)
		}
		delete(c.known, uid)
	}
}

// idsOf are the devices of a pod's containers, sorted.
func idsOf(p api.Pod) (ids []string) {
	for _, c := range p.Containers {
		for _, d := range c.Devices {
			ids = append(ids, d.DeviceIDs...)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}
