// The OpenAI SDK for JavaScript.

import OpenAI from 'openai';
import { ResponsesToolRunner, runnerFunction } from 'openai/helpers/responses-tool-runner';
import { zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod';
import { ResponsesWS } from 'openai/resources/responses/ws';
import { z } from 'zod';
import { catchError, PIXEL, readAll, runCases } from './harness.mjs';

const Profile = z.object({ name: z.string(), age: z.number().int() });
const weather = zodResponsesFunction({
  name: 'get_weather',
  description: 'Get the weather of a city',
  parameters: z.object({ city: z.string() }),
  function: ({ city }) => `mild in ${city}`,
});

const say = (...texts) => texts.map((text) => ({ type: 'message', role: 'user', content: text }));
const join = (events) =>
  events.flatMap((event) => (event.type === 'response.output_text.delta' ? event.delta : [])).join('');
const typesOf = (each) => each.map(({ type }) => type);
const answer = (call, output) => ({ type: 'function_call_output', call_id: call.call_id, output });

await runCases(({ url, model }) => {
  const client = new OpenAI({ baseURL: url, apiKey: 'any', maxRetries: 0 });
  const { responses, conversations } = client;

  return {
    async chain() {
      const first = await responses.create({ model, input: 'my name is ada' });
      const second = await responses.create({ model, input: 'recall', previous_response_id: first.id });
      const stored = await responses.retrieve(second.id);
      const items = await readAll(responses.inputItems.list(second.id, { order: 'asc' }));
      await responses.delete(second.id);
      const gone = await catchError(() => responses.retrieve(second.id));
      return {
        texts: [first.output_text, second.output_text, stored.output_text],
        follows: second.previous_response_id === first.id,
        items: items.map((item) => item.content[0].text),
        gone: gone.constructor.name,
      };
    },

    async stream() {
      const raw = await readAll(await responses.create({ model, input: 'hello there', stream: true }));
      const helper = responses.stream({ model, input: 'hello there' });
      const events = await readAll(helper);
      const final = await helper.finalResponse();
      return {
        raw: typesOf(raw),
        helper: typesOf(events),
        numbers: events.map((event) => event.sequence_number),
        texts: [join(raw), join(events), raw.at(-1).response.output[0].content[0].text, final.output_text],
        status: final.status,
      };
    },

    async parse() {
      const text = { format: zodTextFormat(Profile, 'profile') };
      const whole = await responses.parse({ model, input: 'profile', text });
      const streamed = await responses.stream({ model, input: 'profile', text }).finalResponse();
      return [whole.output_parsed, streamed.output_parsed];
    },

    // The client stores the history and sends all output items again.
    async reasoning() {
      const settings = { model, store: false, include: ['reasoning.encrypted_content'], tools: [weather] };
      const first = await responses.parse({ ...settings, input: 'weather' });
      const [thought, call] = first.output;
      const input = [...say('weather'), ...first.output, answer(call, 'mild')];
      const second = await responses.create({ ...settings, input });
      return {
        types: typesOf(first.output),
        summary: thought.summary,
        sealed: typeof thought.encrypted_content,
        call: [call.name, call.parsed_arguments],
        text: second.output_text,
      };
    },

    async runner() {
      const runner = new ResponsesToolRunner({ functions: [runnerFunction(weather)] });
      const seen = [];
      const whole = await runner.run(client, { model, input: 'weather' });
      const streamed = await runner.run(
        client,
        { model, input: 'weather' },
        { stream: true, onEvent: (event) => void seen.push(event) },
      );
      return { texts: [whole.output_text, streamed.output_text], joined: join(seen) };
    },

    async image() {
      const content = [
        { type: 'input_text', text: 'what is this' },
        { type: 'input_image', image_url: `data:image/png;base64,${PIXEL}`, detail: 'low' },
      ];
      return (await responses.create({ model, input: [{ role: 'user', content }] })).output_text;
    },

    async background() {
      const made = await responses.create({ model, input: 'hello there', background: true });
      const whole = await readAll(await responses.retrieve(made.id, { stream: true }));
      const rest = await readAll(await responses.retrieve(made.id, { stream: true, starting_after: 3 }));
      const helper = responses.stream({ response_id: made.id, starting_after: 2 });
      return {
        status: made.status,
        types: typesOf(whole),
        resumed: JSON.stringify(rest) === JSON.stringify(whole.slice(4)),
        text: (await helper.finalResponse()).output_text,
      };
    },

    async cancel() {
      const made = await responses.create({ model, input: 'wait', background: true });
      const stream = await responses.retrieve(made.id, { stream: true });
      for await (const event of stream) {
        if (event.type === 'response.output_text.delta') break;
      }
      const cancelled = await responses.cancel(made.id);
      return [cancelled.status, cancelled.output[0].content[0].text];
    },

    async conversation() {
      const made = await conversations.create({ items: say('my name is ada'), metadata: { topic: 'names' } });
      const updated = await conversations.update(made.id, { metadata: { topic: 'people' } });
      const second = await responses.create({ model, input: 'recall', conversation: made.id });
      const items = await readAll(conversations.items.list(made.id, { limit: 1, order: 'asc' }));
      await conversations.items.delete(items[0].id, { conversation_id: made.id });
      const left = await readAll(conversations.items.list(made.id));
      const deleted = await conversations.delete(made.id);
      const gone = await catchError(() => conversations.retrieve(made.id));
      return {
        metadata: [made.metadata, updated.metadata],
        text: second.output_text,
        items: items.map((item) => item.content[0].text),
        left: left.length,
        deleted: deleted.deleted,
        gone: gone.constructor.name,
      };
    },

    async errors() {
      const describe = ({ constructor, status, type, code, param }) => [constructor.name, status, type, code, param];
      return [
        describe(await catchError(() => responses.create({ model: 'unknown', input: 'x' }))),
        describe(await catchError(() => responses.create({ model, input: 'x', previous_response_id: 'resp_0' }))),
        describe(await catchError(() => responses.create({ model, input: 'too much' }))),
        describe(await catchError(async () => readAll(await responses.create({ model, input: 'too much', stream: true })))),
      ];
    },

    async breakdown() {
      const failed = await responses.create({ model, input: 'fail' });
      const broken = await catchError(async () => readAll(await responses.create({ model, input: 'fail', stream: true })));
      const short = await responses.stream({ model, input: 'short' }).finalResponse();
      return {
        failed: [failed.status, failed.error],
        broken: [broken.constructor.name, broken.code, broken.message],
        short: [short.status, short.incomplete_details, short.output_text],
      };
    },

    async keepalive() {
      const helper = responses.stream({ model, input: 'slowly' });
      const events = await readAll(helper);
      return { has_keepalive: typesOf(events).includes('keepalive'), text: (await helper.finalResponse()).output_text };
    },

    async websocket() {
      const socket = new ResponsesWS(client);
      const texts = [];
      let types = [];
      socket.send({ type: 'response.create', model, input: 'my name is ada', store: false });
      for await (const message of socket.stream()) {
        if (message.type !== 'message') continue;
        const { type, response } = message.message;
        types.push(type);
        if (type !== 'response.completed') continue;
        texts.push(response.output[0].content[0].text);
        if (texts.length === 2) break;
        types = [];
        const previous = { previous_response_id: response.id };
        socket.send({ type: 'response.create', model, input: 'recall', store: false, ...previous });
      }
      socket.close();
      return { texts, types };
    },

    async embedded() {
      const settings = { model, temperature: 0, max_output_tokens: 40 };
      const helper = responses.stream({ ...settings, input: 'What is the capital of France?' });
      const events = await readAll(helper);
      const final = await helper.finalResponse();
      const called = await responses.parse({
        ...settings,
        input: 'What is the weather in Paris?',
        tools: [weather],
        tool_choice: { type: 'function', name: 'get_weather' },
      });
      const text = { format: zodTextFormat(Profile, 'profile') };
      const parsed = await responses.parse({ ...settings, input: 'Ada is 36 years old.', text });
      return {
        text: final.output_text,
        joined: join(events),
        calls: called.output.map((call) => [call.type, call.name, Object.keys(call.parsed_arguments)]),
        parsed: Object.keys(parsed.output_parsed),
      };
    },
  };
});
