package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"syscall"
	"time"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/manager/model"
)

// Client calls the API of the manager that serves a socket. Its errors wrap ErrNoManager if no manager serves the
// socket, and ErrNotAllowed if this process may not connect. If the manager answers with an error, it is an *Error,
// which wraps the error of the package manager.
type Client struct {
	path string
	http *http.Client
}

const (
	// readTime is how long the response may take to a request that changes nothing.
	readTime = 10 * time.Second
	// maxAnswer is the size of the largest response, and maxEvent that of the largest event, in bytes.
	maxAnswer = 64 << 20
	maxEvent  = 16 << 20
)

// NewClient returns a client for the socket at path.
func NewClient(path string) *Client {
	return &Client{path: path, http: unixsocket.NewHTTPClient(path, maxWait+readTime)}
}

// NewLeaseClient returns a client for leases: on the API's own socket if this process may connect to it, since other
// users cannot fill the queue of that, and otherwise on the socket for leases.
func NewLeaseClient(apiSocket, leaseSocket string) *Client {
	return &Client{path: leaseSocket, http: unixsocket.NewHTTPClient(apiSocket, maxWait+readTime, leaseSocket)}
}

// Admit admits the pod of a manifest in YAML or JSON.
func (c *Client) Admit(ctx context.Context, manifest []byte) (p Pod, err error) {
	err = c.do(ctx, http.MethodPost, "/v1/pods", manifest, &p)
	return p, err
}

// Start returns the run options of a container. It is called before each start of the container.
func (c *Client) Start(ctx context.Context, podUID, container string) (o model.RunOptions, err error) {
	err = c.do(ctx, http.MethodPost, containerPath(podUID, container)+"/start", nil, &o)
	return o, err
}

// Ended records that a container has ended for good.
func (c *Client) Ended(ctx context.Context, podUID, container string) error {
	return c.do(ctx, http.MethodPost, containerPath(podUID, container)+"/ended", nil, nil)
}

// Release releases the devices of a pod.
func (c *Client) Release(ctx context.Context, podUID string) error {
	return c.do(ctx, http.MethodDelete, podPath(podUID), nil, nil)
}

// Pods returns the placed pods in the order of their admission.
func (c *Client) Pods(ctx context.Context) ([]Pod, error) {
	var list PodList
	err := c.do(ctx, http.MethodGet, "/v1/pods", nil, &list)
	return list.Items, err
}

// Devices returns the resources with their devices.
func (c *Client) Devices(ctx context.Context) (list ResourceList, err error) {
	err = c.do(ctx, http.MethodGet, "/v1/devices", nil, &list)
	return list, err
}

// Free frees withheld devices that no container uses.
func (c *Client) Free(ctx context.Context, r FreeRequest) error {
	body, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("make the request: %w", err)
	}
	return c.do(ctx, http.MethodPost, "/v1/devices/free", body, nil)
}

// Node returns the node's capacity and its allocatable resources.
func (c *Client) Node(ctx context.Context) (s NodeStatus, err error) {
	err = c.do(ctx, http.MethodGet, "/v1/node", nil, &s)
	return s, err
}

// Watch calls the function `each` for every change, until ctx ends or the function returns an error, which Watch then
// returns. It calls the function `begun` when the watch has begun: a list that is made after that misses no change.
func (c *Client) Watch(ctx context.Context, begun func(), each func(Event) error) error {
	answer, err := c.send(ctx, http.MethodGet, "/v1/watch", nil)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return readError(answer)
	}
	begun()
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(nil, maxEvent)
	for lines.Scan() {
		var e Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return fmt.Errorf("read an event: %w", err)
		}
		if e.Type == ErrorEvent {
			return fmt.Errorf("watch the device manager: %s", e.Error)
		}
		if err := each(e); err != nil {
			return err
		}
	}
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case lines.Err() != nil:
		return fmt.Errorf("watch the device manager: %w", lines.Err())
	}
	return fmt.Errorf("watch the device manager: %w", unixsocket.ErrEnded)
}

func podPath(uid string) string { return "/v1/pods/" + url.PathEscape(uid) }

func containerPath(podUID, container string) string {
	return podPath(podUID) + "/containers/" + url.PathEscape(container)
}

// do sends a request and decodes the response into `into`, unless that is nil.
func (c *Client) do(ctx context.Context, method, path string, body []byte, into any) error {
	if method == http.MethodGet {
		var end context.CancelFunc
		ctx, end = context.WithTimeoutCause(
			ctx,
			readTime,
			fmt.Errorf("the device manager at %s does not answer", c.path),
		)
		defer end()
	}
	answer, err := c.send(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode >= http.StatusBadRequest {
		return readError(answer)
	}
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxAnswer)).Decode(into); err != nil {
		return fmt.Errorf("read the answer of the device manager: %w", err)
	}
	return nil
}

func (c *Client) send(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	q, err := http.NewRequestWithContext(ctx, method, "http://manager"+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	answer, err := c.http.Do(q)
	switch {
	case err == nil:
		return answer, nil
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("%w %s", ErrNoManager, c.path)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%w %s", ErrNotAllowed, c.path)
	case unixsocket.IsEnd(err):
		err = unixsocket.ErrEnded
	}
	if request, ok := errors.AsType[*url.Error](err); ok {
		err = request.Err // without the method and the URL
	}
	return nil, fmt.Errorf("send a request to the device manager at %s: %w", c.path, err)
}

// readError returns the error in a response.
func readError(answer *http.Response) error {
	text, _ := io.ReadAll(io.LimitReader(answer.Body, maxBody))
	failed := &Error{}
	if err := json.Unmarshal(text, failed); err != nil || failed.Text == "" {
		return fmt.Errorf("the device manager answered %s", answer.Status)
	}
	failed.Code = answer.StatusCode
	return failed
}
