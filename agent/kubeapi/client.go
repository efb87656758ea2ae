package kubeapi

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wording"
)

const (
	// maxAnswer bounds how much of an answer with an error is read, and maxHeader the headers of an answer, in bytes.
	maxAnswer = 16 << 10
	maxHeader = 64 << 10
	// maxCredential bounds a token or a certificate file, in bytes.
	maxCredential = 1 << 20
)

const (
	asJSON           = "application/json"
	asStrategicMerge = "application/strategic-merge-patch+json"
)

// client sends requests to the API server as a service account.
type client struct {
	address string        // host:port
	dir     string        // has the service account's token and ca.crt
	timeout time.Duration // for a request, including the time to connect
}

// statusError means that the API server answered with a status other than success.
type statusError struct {
	code    int
	message string
}

func (e *statusError) Error() string {
	return fmt.Sprintf("the API server answers %d: %s", e.code, e.message)
}

// answered reports whether an error means that the API server answered with one of these status codes.
func answered(err error, codes ...int) bool {
	status, ok := errors.AsType[*statusError](err)
	return ok && slices.Contains(codes, status.code)
}

// credentials reads the token and the certificates of the authorities that may have signed the API server's
// certificate. The kubelet replaces both from time to time.
func (c *client) credentials() (token string, ca *x509.CertPool, err error) {
	data, err := fileio.ReadFile(filepath.Join(c.dir, "token"), maxCredential)
	if err != nil {
		return "", nil, fmt.Errorf("read the service account's token: %w", err)
	}
	if token = strings.TrimSpace(string(data)); token == "" {
		return "", nil, fmt.Errorf("read the service account's token: %s is empty", filepath.Join(c.dir, "token"))
	}
	path := filepath.Join(c.dir, "ca.crt")
	if data, err = fileio.ReadFile(path, maxCredential); err != nil {
		return "", nil, fmt.Errorf("read the certificates of the API server's CA: %w", err)
	}
	ca = x509.NewCertPool()
	if !ca.AppendCertsFromPEM(data) {
		return "", nil, fmt.Errorf("read the certificates of the API server's CA: %s has none", path)
	}
	return token, ca, nil
}

// do sends an object and returns nil if the API server accepted it. Requests are rare, so each has a connection of its
// own, with the current credentials. No proxy is used and no redirection followed, since neither may get the token.
func (c *client) do(ctx context.Context, method, path, contentType string, object any) error {
	token, ca, err := c.credentials()
	if err != nil {
		return err
	}
	body, err := json.Marshal(object)
	if err != nil {
		return fmt.Errorf("write %T as JSON: %w", object, err)
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, method, "https://"+c.address+path, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("make a request for the API server: %w", err)
	}
	q.Header.Set("Authorization", "Bearer "+token)
	q.Header.Set("Content-Type", contentType)
	q.Header.Set("Accept", asJSON)
	q.Header.Set("User-Agent", component)
	sender := http.Client{
		Transport: &http.Transport{
			DialContext:            (&net.Dialer{}).DialContext,
			TLSClientConfig:        &tls.Config{RootCAs: ca, MinVersion: tls.VersionTLS12},
			DisableKeepAlives:      true,
			MaxResponseHeaderBytes: maxHeader,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	answer, err := sender.Do(q)
	if err != nil {
		return fmt.Errorf("call the API server: %w", err)
	}
	defer answer.Body.Close()
	if answer.StatusCode/100 == 2 {
		return nil // the object in the answer is not needed
	}
	return &statusError{answer.StatusCode, message(answer)}
}

// message returns the API server's reason for an error: the message of a Status object, or the HTTP status.
func message(answer *http.Response) string {
	data, _ := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	var status struct{ Message string }
	_ = json.Unmarshal(data, &status)
	return cmp.Or(wording.Shorten(status.Message, maxMessage), answer.Status)
}
