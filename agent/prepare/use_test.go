package prepare

import (
	"errors"
	"testing"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/testenv"
)

// What is found without a container must be what Run would refuse the device for, and nothing may be changed.
func TestFindUse(t *testing.T) {
	process := func(t *testing.T) gpu.Use {
		t.Helper()
		pid := start(t, "", nil, "sleep", "1000").Process.Pid
		return gpu.Use{Processes: []gpu.Process{{PID: pid, Compute: true, MemoryBytes: 1 << 30}}, MemoryUsed: 1 << 30}
	}
	memory := func(*testing.T) gpu.Use { return gpu.Use{MemoryUsed: 2 << 30} }
	for name, c := range map[string]struct {
		rules  Rules
		use    func(*testing.T) gpu.Use
		shared string
		want   string // a part of what is found
	}{
		"nothing uses it": {
			rules: Rules{Policy: Clean}, use: func(*testing.T) gpu.Use { return gpu.Use{} },
		},
		"a process":                           {rules: Rules{Policy: Check}, use: process, want: "(sleep, user root, "},
		"a process, and a reset would follow": {rules: Rules{Policy: Reset}, use: process, want: "still uses it"},
		"memory": {
			rules: Rules{Policy: Check}, use: memory, want: "2048 MiB are in use without a process",
		},
		"memory, and a reset would follow":    {rules: Rules{Policy: Reset}, use: memory},
		"a shared device is others' business": {rules: Rules{Policy: Clean}, use: process, shared: "it has 2 replicas"},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeNode{use: c.use(t), shared: c.shared, healthErr: errors.New("it is suspect")}
			r := newRunner(t, f)
			r.opts.AwaitUnused = time.Hour // no container waits
			r.opts.Resetter = &fakeReset{node: f, outcomes: []Outcome{ResetDone}}
			found, err := r.FindUse(within(t, plenty), device, c.rules)
			testenv.Must(t, err)
			var finding error
			if found.Text != "" {
				finding = errors.New(found.Text)
			}
			checkError(t, finding, c.want)
			if len(f.log) > 0 {
				t.Errorf("the device was changed: %v", f.log)
			}
		})
	}
}

func TestWhatUsesADeviceIsNotKnown(t *testing.T) {
	rules := DefaultRules()
	rules.Policy = Reset
	for _, why := range []error{errors.New("GPU is lost"), gpu.ErrResetRequired} {
		f := &fakeNode{useErr: why}
		r := newRunner(t, f)
		r.opts.Resetter = &fakeReset{node: f}
		found, err := r.FindUse(t.Context(), device, rules)
		if found.Text != "" {
			t.Errorf("found %q", found.Text)
		}
		checkError(t, err, why.Error())
	}
}

// A device is not looked at while it is prepared: its container may use it at once.
func TestFindUseWaitsForAPreparation(t *testing.T) {
	f := &fakeNode{hang: make(chan struct{})}
	r := newRunner(t, f)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, err := runOne(r, t.Context(), device, DefaultRules())
		checkError(t, err, "")
	}()
	testenv.Eventually(t, "the device is prepared", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.running[uuid] != nil
	})
	_, err := r.FindUse(within(t, 50*time.Millisecond), device, DefaultRules())
	checkError(t, err, "(wait): ")
	close(f.hang)
	<-ended
	_, err = r.FindUse(t.Context(), device, DefaultRules())
	checkError(t, err, "")
}
