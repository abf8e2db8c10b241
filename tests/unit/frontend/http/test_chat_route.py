def test_smoke(call):
    r = call.chat("hello", max_tokens=100)
    print(r.status_code, r.text)
    r = call.chat("héllo", max_tokens=100, stream=True, n=2, stream_options={"include_usage": True})
    print(r.status_code, r.text[-1500:])
    r = call.complete("héllo", max_tokens=0, echo=True, logprobs=2)
    print(r.status_code, r.text[-1500:])
    r = call.get("/openapi.json")
    print(r.status_code, len(r.text))
    pass
