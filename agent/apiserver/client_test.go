package apiserver

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/apiservertest"
	"gpu-cdi-plugin/test/lib/testenv"
)

const path = "/apis/resource.k8s.io/v1/resourceslices"

func client(t *testing.T, api *apiservertest.Server, keepIdle time.Duration) *Client {
	t.Helper()
	c, err := New(Options{Credentials: api.Dir, Env: api.Env(), Timeout: time.Minute, KeepIdle: keepIdle})
	testenv.Must(t, err)
	return c
}

func get(t *testing.T, c *Client) {
	t.Helper()
	var list struct{ Kind string }
	testenv.Must(t, c.Get(t.Context(), path, &list))
	if list.Kind != "ResourceSliceList" {
		t.Errorf("it got %q", list.Kind)
	}
}

func TestConnectionsAreKeptOnlyOnRequest(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		keepIdle time.Duration
		want     int
	}{
		"each request has its own": {0, 3},
		"one for all":              {time.Minute, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api := apiservertest.New(t)
			sender := client(t, api, c.keepIdle)
			for range 3 {
				get(t, sender)
			}
			if n := api.Connections(); n != c.want {
				t.Errorf("%d connections, want %d", n, c.want)
			}
		})
	}
}

func TestConnectionsOfRequestsAtOnceAreKept(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t)
	c := client(t, api, time.Minute)
	for range 2 {
		var arrived, answered sync.WaitGroup
		arrived.Add(maxIdle)
		api.Instead(func(w http.ResponseWriter, _ *http.Request) {
			arrived.Done()
			arrived.Wait()
			_, _ = io.WriteString(w, "{}")
		})
		for range maxIdle {
			answered.Go(func() {
				if err := c.Get(t.Context(), path, &struct{}{}); err != nil {
					t.Error(err)
				}
			})
		}
		answered.Wait()
	}
	if n := api.Connections(); n != maxIdle {
		t.Errorf("%d connections for twice %d requests at once, want %d", n, maxIdle, maxIdle)
	}
}

// A connection is used no more once its server may not be the API server any more.
func TestNewCertificatesEndOldConnections(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t)
	c := client(t, api, time.Minute)
	get(t, c)
	api.Rotate("second") // the token belongs to requests, not to connections
	get(t, c)
	if n := api.Connections(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
	api.NewCA()
	if err := c.Get(t.Context(), path, &struct{}{}); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a server that an unknown CA has signed: %v", err)
	}
}

func TestAnswersThatAreNoObject(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"text": {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }, "invalid character"},
		"an object without an end": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"kind":"`)
			for range maxObject/1024 + 1 {
				if _, err := w.Write(make([]byte, 1024)); err != nil {
					return
				}
			}
		}, "more than 16777216 bytes"},
		"a Status": {func(w http.ResponseWriter, _ *http.Request) {
			apiservertest.Fail(w, http.StatusForbidden, "no relationship found between node and this object")
		}, "answers 403: no relationship found"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api := apiservertest.New(t)
			api.Instead(c.answer)
			err := client(t, api, 0).Get(t.Context(), path, &struct{}{})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want an error with %q", err, c.want)
			}
		})
	}
}

func TestAwaitChange(t *testing.T) {
	t.Parallel()
	slice := func(node string) map[string]any {
		return map[string]any{
			"metadata": map[string]any{"name": node}, "spec": map[string]any{"driver": "d", "nodeName": node},
		}
	}
	const watch = path + "?watch=1&resourceVersion=0&fieldSelector=spec.nodeName=n"
	begin := func(t *testing.T, api *apiservertest.Server, limit time.Duration) <-chan error {
		ended := make(chan error, 1)
		c := client(t, api, 0)
		go func() { ended <- c.AwaitChange(t.Context(), watch, limit) }()
		testenv.Eventually(t, "the watch begins", func() bool { return api.Requests() > 0 })
		return ended
	}
	t.Run("a change ends it", func(t *testing.T) {
		t.Parallel()
		api := apiservertest.New(t)
		ended := begin(t, api, time.Hour)
		api.PutSlice(slice("other"))
		select {
		case err := <-ended:
			t.Errorf("a change that it does not cover ends it: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
		api.PutSlice(slice("n"))
		testenv.Must(t, <-ended)
	})
	t.Run("its limit ends it", func(t *testing.T) {
		t.Parallel()
		testenv.Must(t, <-begin(t, apiservertest.New(t), time.Second))
	})
	t.Run("an error is returned", func(t *testing.T) {
		t.Parallel()
		api := apiservertest.New(t)
		api.Instead(func(w http.ResponseWriter, _ *http.Request) {
			apiservertest.Fail(w, http.StatusGone, "too old resource version")
		})
		if err := <-begin(t, api, time.Hour); !Answered(err, http.StatusGone) {
			t.Errorf("it ends with %v", err)
		}
	})
	t.Run("a server that does not answer", func(t *testing.T) {
		t.Parallel()
		api := apiservertest.New(t)
		api.Hang()
		c := client(t, api, 0)
		c.timeout = 50 * time.Millisecond
		if err := c.AwaitChange(t.Context(), watch, time.Hour); err == nil {
			t.Error("no error")
		}
	})
}

func TestWithoutCredentials(t *testing.T) {
	t.Parallel()
	env := []string{"NODE_NAME=n", "KUBERNETES_SERVICE_HOST=h", "KUBERNETES_SERVICE_PORT=1"}
	for name, c := range map[string]struct {
		env  []string
		want string
	}{
		"no variable": {env[:1], "KUBERNETES_SERVICE_HOST is not set"},
		"no token":    {env, "read the service account's token"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := New(Options{Credentials: t.TempDir(), Env: c.env})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want an error with %q", err, c.want)
			}
		})
	}
}
